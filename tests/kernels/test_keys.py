"""Triton finds in its cache what another process has compiled, in whatever order that was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import replayssm_quant  # noqa: E402

SCRIPT = """
import importlib, json, sys
names = json.loads(sys.argv[1])
package = "replayssm_quant.kernels."
if sys.argv[2] == "settled":
    for family in json.loads(sys.argv[3]):
        importlib.import_module(f"{package}{family}.triton_ops")
        importlib.import_module(f"{package}{family}.verify")
keys = {}
for name in names:
    module, kernel = name.rsplit(".", 1)
    keys[name] = getattr(importlib.import_module(package + module), kernel).cache_key
print(json.dumps(keys))
"""
KERNELS = [
    "gdn.step.step_kernel",
    "gdn.prepare.prepare_kernel",
    "gdn.flush.flush_kernel",
    "mamba2.step.step_kernel",
    "mamba2.decode.readout_kernel",
    "gdn.verify.verify_prepare_kernel",
]


def keys(names: list[str], how: str, families: tuple[str, ...]) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(replayssm_quant.__file__).resolve().parents[1])}
    asked = [sys.executable, "-c", SCRIPT, json.dumps(names), how, json.dumps(families)]
    done = subprocess.run(asked, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_keys_do_not_depend_on_what_is_launched_first() -> None:
    first = keys(KERNELS, "settled", ("gdn", "mamba2"))
    assert keys(KERNELS[::-1], "settled", ("mamba2", "gdn")) == first
    # Triton's own keys do depend on it: without that, this module could go
    few = KERNELS[:2]
    assert keys(few, "as it comes", ()) != keys(few[::-1], "as it comes", ())
