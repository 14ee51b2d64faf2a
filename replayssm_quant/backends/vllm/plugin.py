"""Entry point of the vLLM plugin: registration, the version gate and the table of patches.

vLLM calls ``register`` in every process, before any configuration exists, so it registers names and
imports nothing heavy. Without ``replayssm_quant`` in additional_config everything stays vLLM's own:
our layers then call vLLM's methods for everything (``layer``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..._paths import drop_checkout
from .blocks import MARK, shorten_scheduler
from .checks import ARCHITECTURES, VERSIONS, check, turn_off_prefix_caching, version_problem
from .options import parse

MODELS = "replayssm_quant.backends.vllm.models"


@dataclass(frozen=True)
class Patch:
    """One place of vLLM that is changed. target is ``module:attribute.path``."""

    target: str
    reason: str
    make: Callable[[Any], Any]
    versions: tuple[tuple[int, int], ...] = VERSIONS

    def apply(self) -> None:
        """Replace the target by what ``make`` returns for it (a table may change in place)."""
        module, path = self.target.split(":")
        *parents, name = path.split(".")
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
        setattr(owner, name, self.make(getattr(owner, name)))


def _marked(replaced: Any) -> bool:
    """True for what an earlier call in this process has put in."""
    return MARK in vars(replaced)


def _check_every_model(table: dict[str, Any]) -> dict[str, Any]:
    from vllm.model_executor.models.config import VerifyAndUpdateConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.version import __version_tuple__

    problem = version_problem(__version_tuple__)

    def checked(base: type) -> type:
        class Checked(base):  # type: ignore[misc, valid-type]
            @classmethod
            def verify_and_update_config(cls, vllm_config: Any) -> None:
                check(vllm_config, problem)
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
        if scheduler_output.scheduled_spec_decode_tokens:
            asked = getattr(self, MARK, None)
            if asked is None:
                asked = parse(self.vllm_config.additional_config) is not None
                setattr(self, MARK, asked)
            if asked:
                drop_placeholder_drafts(scheduler_output, self.requests)
        original(self, scheduler_output)

    setattr(update, MARK, True)
    return update


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
)


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.replayssm_quant")  # only loggers below vllm have a handler


def register() -> None:
    """Register models and apply ``PATCHES``; vLLM's ``vllm.general_plugins`` entry point.

    Idempotent. Outside the supported versions only the check is installed, so that asking for the
    plugin is refused and everything else goes on.
    """
    drop_checkout()
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.version import __version_tuple__

    problem = version_problem(__version_tuple__)
    if problem is not None:
        try:
            PATCHES[0].apply()
        except Exception as error:  # another vLLM: must not break it for those who do not ask
            _logger().warning("%s (%s)", problem, error)
        return
    for patch in PATCHES:
        patch.apply()
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{MODELS}:{architecture}")
