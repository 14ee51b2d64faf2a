"""The leaner host of the end-to-end benchmark, without vLLM."""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replayssm_quant.backends.vllm.generate import environment, plugin_site
from replayssm_quant.kernels.bench import host


class FullAttentionSpec:
    pass


class SlidingWindowSpec:
    pass


class MambaSpec:
    def __init__(self, mode: str = "none"):
        self.mamba_cache_mode = mode


class Manager:
    """A cache manager of two groups, blocks of 64 and 16 tokens; counts how often it looked."""

    def __init__(self, specs: tuple[Any, Any], caching: bool = False):
        self.empty_kv_cache_blocks = object()
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


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("vllm.v1.core.kv_cache_manager")
    found.KVCacheManager = Manager  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


def decode(manager: Manager, steps: int, lookahead: int = 0, lose: int = -1) -> list[int]:
    """Blocks that each step of a request gets; before step ``lose`` it loses all it has."""
    request = SimpleNamespace(request_id="a", num_computed_tokens=0)
    out = []
    for step in range(steps):
        if step == lose:
            manager.free(request)
        new = 1 if request.num_computed_tokens else 20
        got = manager.allocate_slots(request, new, num_lookahead_tokens=lookahead)
        out.append(0 if got is manager.empty_kv_cache_blocks else len(got))
        request.num_computed_tokens += new
    return out


@pytest.mark.parametrize("lookahead", [0, 4])
@pytest.mark.parametrize("lose", [-1, 7])
def test_the_shortcut_finds_the_same_blocks_and_looks_rarely(
    module: ModuleType, lookahead: int, lose: int
) -> None:
    specs = (MambaSpec(), FullAttentionSpec())
    plain = Manager(specs)
    expected = decode(plain, 120, lookahead, lose)
    assert plain.looks == 120 and sum(n > 0 for n in expected) >= 8
    short = Manager(specs)
    before = Manager.allocate_slots
    with host.lean(["blocks"]):
        assert decode(short, 120, lookahead, lose) == expected
    # one look finds blocks, the next one that they do
    assert short.looks == 2 * sum(n > 0 for n in expected)
    assert Manager.allocate_slots is before


@pytest.mark.parametrize(
    ("specs", "caching"),
    [
        ((MambaSpec("align"), FullAttentionSpec()), False),
        ((MambaSpec(), SlidingWindowSpec()), False),
        ((MambaSpec(), FullAttentionSpec()), True),
    ],
)
def test_other_caches_are_looked_at_in_every_step(
    module: ModuleType, specs: tuple[Any, Any], caching: bool
) -> None:
    manager = Manager(specs, caching)
    with host.lean(["blocks"]):
        decode(manager, 40)
    assert manager.looks == 40


def test_events_spin_and_collection_rests_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, *more: Any) -> Any:
            self = super().__new__(cls)
            self.made = (enable_timing, blocking, *more)  # type: ignore[attr-defined]
            return self

    import torch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runner = SimpleNamespace(prepare_inputs_event=Event(False, True))
    kept = runner.prepare_inputs_event
    with host.lean(["spin", "gc"], runner):
        assert torch.cuda.Event(True, blocking=True).made == (True, False)  # type: ignore[attr-defined]
        assert runner.prepare_inputs_event.made == (False, False) and not gc.isenabled()
    assert torch.cuda.Event is Event and runner.prepare_inputs_event is kept and gc.isenabled()
    with host.lean([]):
        assert torch.cuda.Event is Event and gc.isenabled()


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown part 'warp'; known: blocks, spin, gc"):
        with host.lean(["warp"]):
            pass


def _spin(seconds: float, until: Callable[[], float] = time.perf_counter) -> None:
    end = until() + seconds
    while until() < end:
        pass


def test_the_sampler_finds_what_takes_long() -> None:
    sampler = host.Sampler()
    with sampler:
        _spin(0.2)
        time.sleep(0.1)
    table = sampler.table(10)
    within = dict(table["within"])
    # 20 and 10 ms of each of ten steps; other processes may take time from neither in between
    assert within["test_host.py:_spin"] == pytest.approx(20, rel=0.25)
    here = "test_host.py:test_the_sampler_finds_what_takes_long"
    assert within[here] >= within["test_host.py:_spin"] + 7
    assert sampler.total >= 0.29
    assert table["own"][0][0].startswith("test_host.py:_spin:")


def test_threads_have_their_own_time() -> None:
    before = sum(host.thread_seconds().values())
    _spin(0.3, time.process_time)
    assert sum(host.thread_seconds().values()) - before == pytest.approx(0.3, abs=0.1)


ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from replayssm_quant.backends.vllm.generate import environment, plugin_site
from replayssm_quant.kernels.bench import host

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
    llm = LLM(
        sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0,
        enable_prefix_caching=False, max_model_len=1024, num_gpu_blocks_override=24,
    )
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(20)]} for i in range(12)]
    out = []
    for parts in ([], ["blocks"]):
        looks[0] = lost[0] = 0
        with host.lean(parts):
            done = llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(d.outputs[0].token_ids) for d in done]
        out.append({"tokens": tokens, "looks": looks[0], "lost": lost[0]})
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
