"""The leaner host of the end-to-end benchmark, without vLLM."""

import gc
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replayssm_quant.kernels.bench import host


def test_events_spin_and_collection_rests_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, **how: Any) -> Any:
            self = super().__new__(cls)
            self.made = (enable_timing, blocking, *how.values())  # type: ignore[attr-defined]
            return self

    import torch

    monkeypatch.setattr(torch.cuda, "Event", Event)
    runner = SimpleNamespace(prepare_inputs_event=Event(False, True))
    kept = runner.prepare_inputs_event
    with host.lean(["spin", "gc"], runner):
        made = torch.cuda.Event(True, blocking=True, external=True)
        assert made.made == (True, False, True)  # type: ignore[attr-defined]
        assert runner.prepare_inputs_event.made == (False, False) and not gc.isenabled()
    assert torch.cuda.Event is Event and runner.prepare_inputs_event is kept and gc.isenabled()
    with host.lean([]):
        assert torch.cuda.Event is Event and gc.isenabled()


def test_empty_hooks_go_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, used = SimpleNamespace(calls=[]), SimpleNamespace(calls=[print])
    runtime = SimpleNamespace(launch_enter_hook=empty, launch_exit_hook=used)
    triton = ModuleType("triton")
    triton.knobs = SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    with host.lean(["hooks"]):
        assert runtime.launch_enter_hook is None and runtime.launch_exit_hook is used
    assert runtime.launch_enter_hook is empty
    del triton.knobs
    with host.lean(["hooks"]):  # an older Triton
        pass


def test_outputs_are_processed_as_requests_end() -> None:
    class Processor:
        seen: list[list[str]] = []

        def process_outputs(self, outputs: list[Any], timestamp: float) -> float:
            self.seen.append([o.name for o in outputs])
            return timestamp

    processor = Processor()
    going = SimpleNamespace(name="a", finish_reason=None)
    ended = SimpleNamespace(name="b", finish_reason=1)
    with host.lean(["answers"], None, processor):
        assert processor.process_outputs([going, ended], timestamp=3.0) == 3.0
        processor.process_outputs([going], 4.0)
    processor.process_outputs([going], 5.0)
    assert processor.seen == [["b"], [], ["a"]]


def test_the_shortcut_is_there_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate_slots(*_: object) -> str:
        return "looked"

    module = ModuleType("vllm.v1.core.kv_cache_manager")
    module.KVCacheManager = SimpleNamespace(allocate_slots=allocate_slots)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with host.lean(["blocks"]):
        inside = module.KVCacheManager.allocate_slots
        assert inside.__wrapped__ is allocate_slots
        assert inside(None, None, 1, 2) == "looked"  # not the call of a running request
    assert module.KVCacheManager.allocate_slots is allocate_slots


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown part 'warp'; known: blocks, spin, gc, hooks, answers"
    ):
        with host.lean(["warp"]):
            pass


def _spin(seconds: float, until: Callable[[], float] = time.perf_counter) -> None:
    end = until() + seconds
    while until() < end:
        pass


def test_the_sampler_finds_what_takes_long() -> None:
    sampler = host.Sampler()
    with sampler:
        start = time.perf_counter()
        _spin(0.2)
        spun = time.perf_counter() - start
        time.sleep(0.1)
        slept = time.perf_counter() - start - spun
    table = sampler.table(10)
    within = dict(table["within"])
    # milliseconds of each of ten steps; a sample may fall a little late
    assert within["test_host.py:_spin"] == pytest.approx(100 * spun, rel=0.25)
    here = "test_host.py:test_the_sampler_finds_what_takes_long"
    assert within[here] == pytest.approx(100 * (spun + slept), rel=0.25)
    assert sampler.total == pytest.approx(spun + slept, rel=0.25)
    assert table["own"][0][0].startswith("test_host.py:_spin:")


def test_cores_to_measure_on_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5, 6, 7})
    read = {"0": "0,4", "1": "1,5"}
    monkeypatch.setattr(host.Path, "read_text", lambda p: read.get(p.parts[-3][3:], "7"))
    assert host.split_cores(2) == ({0, 1}, {2, 3, 6, 7})
    read |= {"0": "0-1", "1": "0-1"}
    assert host.split_cores(2) == ({0, 1}, {2, 3, 4, 5, 6, 7})
    for count in (0, 8):
        assert host.split_cores(count) == (set(range(8)), set(range(8)))


def test_every_thread_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {}
    monkeypatch.setattr(
        host.os, "sched_setaffinity", lambda task, cores: moved.update({task: cores})
    )
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    host.move_to({3})
    assert moved.keys() >= {threading.get_native_id(), other.native_id}
    assert all(cores == {3} for cores in moved.values())
    done.set()
    other.join()


def test_threads_have_their_own_time() -> None:
    before = sum(host.thread_seconds().values())
    _spin(0.3, time.process_time)
    assert sum(host.thread_seconds().values()) - before == pytest.approx(0.3, abs=0.1)
