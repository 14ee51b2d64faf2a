"""Kernels that are compiled in threads before their first launch. No GPU: compiled for sm_90."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from replayssm_quant.kernels.common.ahead import can_compile_ahead, compile_ahead, first_alone

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit
from replayssm_quant.kernels.common.ahead import can_compile_ahead, compile_ahead
from replayssm_quant.backends.vllm.cursor_kernel import _decode_rows_kernel, _move_rows_kernel


class Target:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, src, metadata):
        launchers.append(metadata.name)
        raise RuntimeError("nothing to run on")


launchers = []
driver._active = Target()
compiled, run, compile_one = [], jit.JITFunction.run, jit.JITFunction._do_compile


def seen(self, *args, **kwargs):
    compiled.append(self.fn.__name__)
    return compile_one(self, *args, **kwargs)


jit.JITFunction._do_compile = seen
int64, int32, byte = (torch.zeros(4, dtype=t) for t in (torch.int64, torch.int32, torch.uint8))
rows = (int64, int32, byte, int32, int64)


def steps(lengths, block, **how):
    for length in lengths:
        _decode_rows_kernel.run(
            int32, int32, int32, int64, int64, *rows, 1, 4, L=length, STAGGER=False,
            REQUESTS=False, BLOCK=block, num_warps=4, grid=(1,), **how
        )
    _move_rows_kernel.run(
        int32, int32, byte, int32, int64, *rows, 1, 4, BLOCK=block, num_warps=4, grid=(1,), **how
    )


assert can_compile_ahead()
with compile_ahead(threads=2) as found:
    steps([4, 8], 128, warmup=False)  # would run, and there is nothing to run on
    steps([], 127, warmup=False)  # does not compile: no power of two
ahead = sorted(compiled)
steps([4, 8], 128, warmup=True)
print(json.dumps({
    "ahead": ahead, "late": compiled[len(ahead):], "kernels": found.kernels,
    "threads": found.threads, "seconds": found.seconds, "errors": found.errors,
    "restored": jit.JITFunction.run is run, "launchers": launchers,
}))
"""


def test_what_was_compiled_ahead_is_not_compiled_again(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ahead"] == ["_decode_rows_kernel"] * 2 + ["_move_rows_kernel"] * 2
    assert found["late"] == [] and found["kernels"] == 4 and found["threads"] == 2
    assert len(found["errors"]) == 1 and "power of 2" in found["errors"][0]
    assert found["seconds"] > 0 and found["restored"]
    assert sorted(found["launchers"]) == ["_decode_rows_kernel"] * 2 + ["_move_rows_kernel"]


def test_the_first_process_compiles_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    order: list[str] = []

    def second() -> None:  # a lock belongs to an open file, so a thread is like a process here
        with first_alone("same") as alone:
            order.append(f"second, alone {alone}")

    other = threading.Thread(target=second)
    with first_alone("same") as alone:
        other.start()
        with first_alone("another") as apart:
            assert alone and apart
        other.join(0.3)
        order.append("first")
    other.join(30)
    assert order == ["first", "second, alone False"]
    with first_alone("same") as alone:
        assert alone


def test_nobody_waits_where_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with first_alone("same") as alone:
        assert not alone


def test_the_interpreter_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not can_compile_ahead()
    with pytest.raises(RuntimeError, match="can_compile_ahead"), compile_ahead():
        pass
