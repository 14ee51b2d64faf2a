"""tools/compile_for_gpu.py fills Triton's cache for a GPU that is not here."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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
    run = ("--run", "mamba2_decode|fp32|super:1")
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


@pytest.fixture
def main() -> Callable[[list[str]], int]:
    """The script's own function, in this process."""
    spec = importlib.util.spec_from_file_location("compile_for_gpu", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


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
    argv: tuple[str, ...], message: str, main: Callable[[list[str]], int]
) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        main(list(argv))
