"""Entry point of the vLLM plugin: registration, the version gate and the table of patches.

vLLM calls ``register`` in every process, before any configuration exists, so it registers names and
imports none of vLLM's modules: each place is changed once its module is imported (``imports``).
Without ``replayssm_quant`` in additional_config everything stays vLLM's own: our layers then call
vLLM's methods for everything (``layer``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..._paths import drop_checkout
from .blocks import MARK, shorten_scheduler
from .checks import (
    ANY_VERSION,
    ARCHITECTURES,
    VERSIONS,
    check,
    turn_off_prefix_caching,
    version_problem,
)
from .imports import when_imported
from .options import parse

MODELS = "replayssm_quant.backends.vllm.models"
REGISTRY = "vllm.model_executor.models.registry"


@dataclass(frozen=True)
class Patch:
    """One place of vLLM that is changed.

    target is ``module:attribute.path``; versions the first and the last vLLM that it is for. early:
    whether it has to be there before weights are loaded; what is not belongs to the processes that
    run the model, and its module is theirs to import.
    """

    target: str
    reason: str
    make: Callable[[Any], Any]
    versions: tuple[tuple[int, int], tuple[int, int]] = (VERSIONS[0], VERSIONS[-1])
    early: bool = True

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def covers(self, version: tuple[int, ...]) -> bool:
        return self.versions[0] <= version[:2] <= self.versions[1]

    def apply(self) -> None:
        """Replace the target by what ``make`` returns for it (a table may change in place).

        Raises RuntimeError, in one line, where there is no such target.
        """
        *parents, name = self.target.partition(":")[2].split(".")
        try:
            owner = functools.reduce(getattr, parents, importlib.import_module(self.module))
            replaced = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            line = " ".join(str(error).split())
            raise RuntimeError(
                f"replayssm_quant cannot change {self.target} in this vLLM: {line}"
            ) from None
        setattr(owner, name, self.make(replaced))

    def install(self) -> None:
        """Apply it; a failure matters to those who ask for the plugin (``refuse_what_failed``)."""
        try:
            self.apply()
        except Exception as error:
            problem = version_problem(_version())
            line = str(error) if problem is None else f"{problem} ({error})"
            _failed[self.target] = line
            _logger().warning("%s", line)


_wanted: list[Patch] = []
_failed: dict[str, str] = {}
"""What kept a patch from being applied in this process, by target."""


def refuse_what_failed() -> None:
    """Have every early patch applied now, and raise ValueError, in one line, if one was not."""
    for patch in _wanted:
        if not patch.early:
            continue
        try:
            importlib.import_module(patch.module)
        except ImportError:
            patch.install()  # which says so
    if _failed:
        raise ValueError("; ".join(_failed.values()))


def _marked(replaced: Any) -> bool:
    """True for what an earlier call in this process has put in."""
    return MARK in vars(replaced)


def _check_every_model(table: dict[str, Any]) -> dict[str, Any]:
    from vllm.model_executor.models.config import VerifyAndUpdateConfig
    from vllm.model_executor.models.registry import ModelRegistry

    problem = version_problem(_version())

    def checked(base: type) -> type:
        class Checked(base):  # type: ignore[misc, valid-type]
            @classmethod
            def verify_and_update_config(cls, vllm_config: Any) -> None:
                if check(vllm_config, problem) is not None:
                    refuse_what_failed()
                base.verify_and_update_config(vllm_config)

        Checked.__name__ = Checked.__qualname__ = base.__name__
        setattr(Checked, MARK, True)
        return Checked

    for architecture in ModelRegistry.get_supported_archs():
        base = table.get(architecture, VerifyAndUpdateConfig)
        if not _marked(base):
            table[architecture] = checked(base)
    return table


def _no_prefix_caching_by_default(original: Callable) -> Callable:
    if _marked(original):
        return original

    @functools.wraps(original)
    def defaults(self: Any, *args: Any, **kwargs: Any) -> Any:
        turn_off_prefix_caching(self, _logger().warning)
        return original(self, *args, **kwargs)

    setattr(defaults, MARK, True)
    return defaults


def _asked(owner: Any) -> bool:
    """Whether the user asked for the plugin, of an object with a ``vllm_config``; kept there."""
    found = getattr(owner, MARK, None)
    if found is None:
        found = parse(owner.vllm_config.additional_config) is not None
        setattr(owner, MARK, found)
    return found


def drop_placeholder_drafts(output: Any, requests: Any) -> None:
    """Take the placeholder drafts from prompts of one token in a SchedulerOutput.

    vLLM pads such a prompt to the length of the rows that verify drafts, if there are any. But it
    is a prefill, which keeps every token it is given: the placeholders would stay in the state.
    """
    drafts = output.scheduled_spec_decode_tokens
    for name in [n for n in drafts if requests[n].num_computed_tokens == 0]:
        count = len(drafts.pop(name))
        output.num_scheduled_tokens[name] -= count
        output.total_num_scheduled_tokens -= count


def _without_placeholder_drafts(original: Callable) -> Callable:
    if _marked(original):
        return original

    @functools.wraps(original)
    def update(self: Any, scheduler_output: Any) -> None:
        if scheduler_output.scheduled_spec_decode_tokens and _asked(self):
            drop_placeholder_drafts(scheduler_output, self.requests)
        original(self, scheduler_output)

    setattr(update, MARK, True)
    return update


def _no_decode_graph_for_prompts(original: Callable) -> Callable:
    """V1 takes rows of equal length for decode rows, and replays the graph captured for those.

    The metadata says that rows which still read their prompt are prefills, so that the graph finds
    no rows of its own and computes nothing that counts. Plain vLLM does so, too; its V2 runner asks
    whether there is a prefill.
    """
    if _marked(original):
        return original

    @functools.wraps(original)
    def determine(self: Any, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("force_uniform_decode") is None and _asked(self):
            batch = self.input_batch
            computed, prompt = batch.num_computed_tokens_cpu, batch.num_prompt_tokens
            if (computed[:num_reqs] < prompt[:num_reqs]).any():
                kwargs["force_uniform_decode"] = False
        return original(self, num_tokens, num_reqs, *args, **kwargs)

    setattr(determine, MARK, True)
    return determine


PATCHES = (
    Patch(
        "vllm.model_executor.models.config:MODELS_CONFIG_MAP",
        "the hook that runs first for each model: refuses what a split state cannot do, and every "
        "other model, before weights are loaded",
        _check_every_model,
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs._set_default_chunked_prefill_and_prefix_caching_args",
        "hybrid models cache prefixes by default; only here is it known that the user did not ask",
        _no_prefix_caching_by_default,
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
        "a prompt of one token beside rows with drafts is padded with placeholders, which its "
        "prefill would keep in the state; this is the first call that sees a planned step",
        _without_placeholder_drafts,
    ),
    Patch(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        "on hybrid models vLLM asks every cache group for blocks, for each request and step, which "
        "a decode step rarely needs",
        shorten_scheduler,
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        "V1 replays the graph of decode steps for prompts, or last parts of them, that are as long "
        "as decode rows, which are prefills to the metadata",
        _no_decode_graph_for_prompts,
        early=False,
    ),
)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.replayssm_quant")  # only loggers below vllm have a handler


def _version() -> tuple[Any, ...]:
    from vllm.version import __version_tuple__

    return tuple(__version_tuple__)


def _install(patch: Patch) -> None:
    if patch not in _wanted:
        _wanted.append(patch)
    when_imported(patch.module, patch.install)


def _register_models() -> None:
    registry = importlib.import_module(REGISTRY).ModelRegistry
    for architecture in ARCHITECTURES:
        registry.register_model(architecture, f"{MODELS}:{architecture}")


def register() -> None:
    """Register models and apply ``PATCHES``; vLLM's ``vllm.general_plugins`` entry point.

    Idempotent. Outside the supported versions only the check is installed, so that asking for the
    plugin is refused and everything else goes on; ``ANY_VERSION`` installs everything there, and
    names each patch that is not known to fit.
    """
    drop_checkout()
    version = _version()
    if version_problem(version) is not None:
        _install(PATCHES[0])
        return
    known = version[:2] in VERSIONS
    for patch in PATCHES:
        if not patch.covers(version):
            if known:  # this vLLM does without it
                continue
            _logger().warning(
                "%s=1: replayssm_quant changes %s as in vLLM %s, though this is %s",
                ANY_VERSION,
                patch.target,
                " to ".join(".".join(map(str, v)) for v in patch.versions),
                ".".join(map(str, version[:2])),
            )
        _install(patch)
    when_imported(REGISTRY, _register_models)
