"""tools/compile_for_gpu.py fills Triton's cache for a GPU that is not here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "compile_for_gpu.py"


def compile_for_gpu(cache: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "tools" / "same_triton"), str(ROOT)])
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, str(TOOL), *argv], env=env, capture_output=True, text=True, timeout=600
    )


def has_launchers() -> bool:
    from triton.backends.nvidia import driver

    return hasattr(driver, "make_launcher")


@pytest.mark.slow
@pytest.mark.skipif(
    has_launchers() and shutil.which("gcc") is None, reason="needs gcc, which links launchers"
)
def test_binaries_metadata_and_launchers_are_cached(tmp_path: Path) -> None:
    run = ("--run", "gdn_decode|fp32|qwen3.5-4b:8")
    done = compile_for_gpu(tmp_path, *run)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 kernels" in done.stdout
    (metadata,) = (p for p in tmp_path.rglob("step_kernel.json"))
    assert json.loads(metadata.read_text())["target"]["arch"] == 90
    assert list(tmp_path.rglob("step_kernel.cubin"))
    assert bool(list(tmp_path.rglob("__triton_launcher*.so"))) == has_launchers()
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    again = compile_for_gpu(tmp_path, *run)  # the same names: nothing is compiled anew
    assert again.returncode == 0 and {p for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--run", "gdn|fp32|qwen3.5-4b:8"), "unknown op 'gdn'"),
        (("--run", "gdn_decode|fp31|qwen3.5-4b:8"), "unknown design 'fp31'"),
        (("--run", "gdn_decode|fp32|qwen:8"), "'qwen:8' is no geometry:batch"),
        (("--run", "gdn_decode|fp32|qwen3.5-4b:8", "--part", "3/2"), "write i/n"),
    ],
)
def test_unusable_arguments_are_refused(
    argv: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = compile_for_gpu(tmp_path, *argv)
    assert done.returncode != 0 and message in done.stderr
