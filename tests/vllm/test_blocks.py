"""The shortcut past vLLM's look for cache blocks: same blocks, same tokens, fewer looks."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from replayssm_quant.backends.vllm.blocks import shortcut, shorten_scheduler
from replayssm_quant.backends.vllm.generate import environment, plugin_site
from replayssm_quant.backends.vllm.options import KEY


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


class MambaSpec:
    def __init__(self, mode: str = "none"):
        self.mamba_cache_mode = mode


class Blocks:
    """vLLM's KVCacheBlocks; counts how often it looks at a group."""

    looks = 0

    def __init__(self, blocks: tuple[list[Any], ...]):
        self.blocks = blocks

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Any = None) -> Any:
        groups = self.blocks if group_ids is None else [self.blocks[i] for i in group_ids]
        Blocks.looks += len(groups)
        return None if allow_none and not any(groups) else tuple(list(g) for g in groups)


class Manager:
    """A cache manager of two groups, blocks of 64 and 16 tokens; counts how often it looked."""

    def __init__(self, specs: tuple[Any, Any], caching: bool = False):
        self.empty_kv_cache_blocks = Blocks(([], []))
        self.looks = 0
        groups = [
            SimpleNamespace(
                kv_cache_spec=spec, block_size=size, enable_caching=caching, req_to_blocks={}
            )
            for spec, size in zip(specs, (64, 16), strict=True)
        ]
        self.coordinator = SimpleNamespace(single_type_managers=groups)

    def allocate_slots(self, request: Any, new: int, num_lookahead_tokens: int = 0) -> Any:
        self.looks += 1
        needed, found = request.num_computed_tokens + new + num_lookahead_tokens, []
        for group in self.coordinator.single_type_managers:
            blocks = group.req_to_blocks.setdefault(request.request_id, [])
            while len(blocks) * group.block_size < needed:
                blocks.append(object())
                found.append(blocks[-1])
        return found or self.empty_kv_cache_blocks

    def free(self, request: Any) -> None:
        for group in self.coordinator.single_type_managers:
            del group.req_to_blocks[request.request_id]
        request.num_computed_tokens = 0


def decode(manager: Manager, steps: int, lookahead: int = 0, lose: int = -1) -> list[int]:
    """Blocks that each step of a request gets; before step ``lose`` it loses all it has."""
    request = SimpleNamespace(request_id="a", num_computed_tokens=0)
    out = []
    for step in range(steps):
        if step == lose:
            manager.free(request)
        new = 1 if request.num_computed_tokens else 20
        got = manager.allocate_slots(request, new, num_lookahead_tokens=lookahead)
        out.append(0 if isinstance(got, Blocks) else len(got))
        if isinstance(got, Blocks):
            assert got.blocks is manager.empty_kv_cache_blocks.blocks
            assert got.get_block_ids(allow_none=True) is None
            assert got.get_block_ids() == ([], []) and got.get_block_ids(group_ids=[1]) == ([],)
        request.num_computed_tokens += new
    return out


def scheduler(manager: Manager, **more: Any) -> Any:
    """A Scheduler with that manager as vLLM would make it with the patch."""
    options = {KEY: {"update_dtype": "fp32"} | more.pop("options", {})}

    class Scheduler:
        def __init__(self, additional_config: Any = options) -> None:
            self.vllm_config = SimpleNamespace(additional_config=additional_config)
            self.kv_cache_manager = manager
            self.connector = more.get("connector")

    Scheduler.__init__ = shorten_scheduler(Scheduler.__init__)  # type: ignore[method-assign]
    again = shorten_scheduler(Scheduler.__init__)
    assert again is Scheduler.__init__
    return Scheduler(*more.get("args", ()))


@pytest.mark.parametrize("lookahead", [0, 4])
@pytest.mark.parametrize("lose", [-1, 7])
def test_the_shortcut_finds_the_same_blocks_and_looks_rarely(lookahead: int, lose: int) -> None:
    specs = (MambaSpec(), FullAttentionSpec())
    plain = Manager(specs)
    expected = decode(plain, 120, lookahead, lose)
    assert plain.looks == 120 and sum(n > 0 for n in expected) >= 8
    short = Manager(specs)
    scheduler(short)
    assert decode(short, 120, lookahead, lose) == expected
    # one look finds blocks, the next one that they do
    assert short.looks == 2 * sum(n > 0 for n in expected)
    # that nothing is nothing needs no look at a group
    Blocks.looks = 0
    assert short._no_blocks.get_block_ids(allow_none=True) is None and Blocks.looks == 0


@pytest.mark.parametrize(
    ("specs", "caching"),
    [
        ((MambaSpec("align"), FullAttentionSpec()), False),
        ((MambaSpec(), SlidingWindowSpec()), False),
        ((MambaSpec(), FullAttentionSpec()), True),
    ],
)
def test_other_caches_are_looked_at_in_every_step(specs: tuple[Any, Any], caching: bool) -> None:
    manager = Manager(specs, caching)
    scheduler(manager)
    decode(manager, 40)
    assert manager.looks == 40


@pytest.mark.parametrize(
    "more",
    [
        {"options": {"block_shortcut": False}},
        {"connector": object()},
        {"args": ({},)},  # the plugin is not asked for
    ],
)
def test_the_scheduler_keeps_vllms_own_where_it_should(more: dict[str, Any]) -> None:
    manager = Manager((MambaSpec(), FullAttentionSpec()))
    scheduler(manager, **more)
    assert "allocate_slots" not in vars(manager)


def test_calls_for_requests_that_wait_go_through() -> None:
    seen = []
    allocate = shortcut(lambda self, request, new, *args, **kwargs: seen.append((args, kwargs)))
    allocate(None, None, 5, 3)
    allocate(None, None, 5, full_sequence_must_fit=True)
    assert seen == [((3,), {}), ((), {"full_sequence_must_fit": True})]


ENGINE = """
import gc, json, sys
from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from replayssm_quant.backends.vllm.blocks import shorten_scheduler

looks, lost = [0], [0]
allocate, preempt = KVCacheManager.allocate_slots, Scheduler._preempt_request


def counted(self, *args, **kwargs):
    looks[0] += 1
    return allocate(self, *args, **kwargs)


def counted_loss(self, *args, **kwargs):
    lost[0] += 1
    return preempt(self, *args, **kwargs)


if __name__ == "__main__":
    KVCacheManager.allocate_slots, Scheduler._preempt_request = counted, counted_loss
    Scheduler.__init__ = shorten_scheduler(Scheduler.__init__)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(20)]} for i in range(12)]
    out = []
    for short in (False, True):
        options = {"update_dtype": "fp32", "block_shortcut": short}
        llm = LLM(
            sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0,
            max_model_len=1024, num_gpu_blocks_override=24,
            additional_config={"replayssm_quant": options},
        )
        looks[0] = lost[0] = 0
        done = llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(d.outputs[0].token_ids) for d in done]
        out.append({"tokens": tokens, "looks": looks[0], "lost": lost[0]})
        del llm  # its end tears down what the next one shares
        gc.collect()
    open(sys.argv[2], "w").write(json.dumps(out))
"""


@pytest.mark.slow
def test_an_engine_gives_the_same_tokens_with_fewer_looks(
    vllm_python: str, cpu_environment: dict[str, str], tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    script, out = tmp_path / "engine.py", tmp_path / "out.json"
    script.write_text(ENGINE)
    env = environment(plugin_site(tmp_path / "site"), cpu_environment)
    command = [vllm_python, str(script), str(tiny_models["nemotron_h"]), str(out)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    plain, short = json.loads(out.read_text())
    assert plain["tokens"] == short["tokens"] and {len(t) for t in plain["tokens"]} == {400}
    assert plain["lost"] == short["lost"] > 0  # requests that had to give their blocks back
    assert short["looks"] < 0.1 * plain["looks"]
