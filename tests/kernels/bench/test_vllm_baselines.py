"""vLLM's kernels load from its files without vLLM, leave nothing behind, and compute the step."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from replayssm_quant.kernels.bench import baselines, registry, vllm_baselines  # noqa: E402
from replayssm_quant.kernels.gdn import reference as gdn  # noqa: E402
from replayssm_quant.kernels.mamba2 import reference as mamba2  # noqa: E402
from replayssm_quant.state.geometry import LayerGeometry  # noqa: E402

FAKE = {
    "mamba_ssm.py": (
        "import vllm.envs as envs\n"
        "from vllm import _custom_ops as ops\n"
        "from vllm.logger import init_logger\n"
        "from vllm.model_executor.layers.mamba.ops.triton_helpers import fast_exp\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.triton_utils import HAS_TRITON, tl, triton\n"
        "from vllm.utils.platform_utils import get_device_name_as_file_name\n"
        "from vllm.v1.attention.backends.utils import NULL_BLOCK_ID\n"
        "assert HAS_TRITON and not current_platform.is_xpu() and NULL_BLOCK_ID == 0\n"
        "init_logger(__name__).info_once('loaded')\n"
        "def selective_state_update(): return fast_exp\n"
        "def override_ssm_config(config): return config\n"
    ),
    "triton_helpers.py": "fast_exp = 'fast_exp'\n",
    "replayssm_config.py": "_overrides = {}\n",
    "selective_state_update_replayssm_output_only.py": (
        "from vllm.model_executor.layers.mamba.ops.replayssm_config import _overrides\n"
        "def selective_state_update_replayssm_output_only():\n"
        "    return _overrides.get('mamba2_output_only')\n"
    ),
    "utils.py": "",
    "op.py": "from .utils import __name__ as name\nexp = name\n",
    "fused_recurrent.py": (
        "from .op import exp\ndef fused_recurrent_gated_delta_rule_packed_decode(): return exp\n"
    ),
    "_version.py": "__version__ = version = '0.33.9'\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder laid out as vLLM's package, with stand-ins for its kernel files."""
    for name in vllm_baselines.FILES:
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE[path.name])
    return tmp_path / "unpacked"


def _vllm_modules() -> set[str]:
    return {name for name in sys.modules if name == "vllm" or name.startswith("vllm.")}


def test_loading_leaves_no_module_behind(tree: Path) -> None:
    before = _vllm_modules()
    loaded = vllm_baselines.load(tree)
    assert loaded.version == "0.33.9"
    assert loaded.selective_state_update() == "fast_exp"
    assert loaded.gdn_packed_decode() == "vllm.third_party.flash_linear_attention.ops.utils"
    assert _vllm_modules() == before


def test_the_replay_override_is_undone(tree: Path) -> None:
    loaded = vllm_baselines.load(tree)
    assert loaded.replay_output_only() is None
    with loaded.override_replay((16, 1, 64, 128, 2)):
        assert loaded.replay_output_only() == (16, 1, 64, 128, 2)
        with loaded.override_replay((32, 1, 64, 64, 2)):
            assert loaded.replay_output_only() == (32, 1, 64, 64, 2)
        assert loaded.replay_output_only() == (16, 1, 64, 128, 2)
    assert loaded.replay_output_only() is None


def test_a_wheel_loads_like_its_folder(tree: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.33.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in vllm_baselines.FILES:
            archive.write(tree / name, name)
    assert vllm_baselines.load(wheel).selective_state_update() == "fast_exp"
    with zipfile.ZipFile(tmp_path / "old.whl", "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    with pytest.raises(ValueError, match=r"old\.whl has no vllm/model_executor"):
        vllm_baselines.load(tmp_path / "old.whl")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder that holds 'vllm/'"):
        vllm_baselines.load(tmp_path)
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ValueError, match="vLLM is not installed"):
            vllm_baselines.load(None)


# --- numbers, where vLLM's files are at hand ------------------------------------------------------


@triton.jit
def _exp(x):
    return tl.exp(x)


@pytest.fixture(scope="module")
def vllm() -> vllm_baselines.Baselines:
    path = os.environ.get("REPLAYSSM_VLLM")
    if path is None and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed and REPLAYSSM_VLLM names neither its wheel nor a folder")
    loaded = vllm_baselines.load(path)
    if not torch.cuda.is_available():  # the interpreter cannot call the builtin that this aliases
        loaded.gdn_packed_decode.__globals__["exp"] = _exp
    return loaded


def _close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert float((got.double() - want).abs().max() / want.abs().max()) < bound


@pytest.mark.parametrize("storage, bound", [("fp32", 1e-5), ("fp16", 2e-3)])
def test_native_mamba2(vllm, device: torch.device, storage: str, bound: float) -> None:
    op, g = registry.OPS["mamba2_decode"], LayerGeometry("mamba2", 4, 16, 32, 2)
    b = baselines.make(f"native-{storage}", vllm, op, g, 3, device, sets=2, dtype=torch.float32)
    slots, i = b.pool.slots[0].long(), b.pool.inputs[0]
    step = mamba2.time_step(i.dt, i.dt_bias, True, torch.float32).double()
    y, state = mamba2.recurrent_step(
        b.pool.state[slots].double(), i.x.double(), step, i.A.double(), i.B.double(), i.C.double()
    )
    launch, nbytes = b.launches("mix")[0]
    launch()
    _close(b.out, y + i.D.double()[:, None] * i.x, bound)
    _close(b.pool.state[slots], state, bound)
    assert nbytes == 3 * 2 * g.elements * (4 if storage == "fp32" else 2)


@pytest.mark.parametrize("phase", registry.PHASES)
def test_upstream_replay(vllm, device: torch.device, phase: str) -> None:
    op, g, batch = registry.OPS["mamba2_decode"], LayerGeometry("mamba2", 4, 16, 32, 2), 3
    b = baselines.make("replay-fp32", vllm, op, g, batch, device, sets=1, dtype=torch.float32)
    slots, i = b.pool.slots[0].long(), b.pool.inputs[0]
    launches = b.launches(phase)
    number = min(13, len(launches) - 1)
    valid, flush = registry.phase_rows(phase, number, batch, 16)
    step = mamba2.time_step(i.dt, i.dt_bias, True, torch.float32).double()
    A, ys, states = i.A.double(), [], []
    for r, slot in enumerate(slots.tolist()):
        state = b.pool.state[slot][None].double()
        C = i.C[r : r + 1].double()
        for j in range(valid[r]):
            x, B = b.x_cache[slot][None, :, j].double(), b.B_cache[slot][None, :, j].double()
            _, state = mamba2.recurrent_step(
                state, x, b.dt_cache[slot][None, :, j].double(), A, B, C
            )
        x = i.x[r : r + 1].double()
        y, state = mamba2.recurrent_step(state, x, step[r : r + 1], A, i.B[r : r + 1].double(), C)
        ys.append(y + i.D.double()[:, None] * x)
        states.append(state)
    launches[number][0]()
    _close(b.out, torch.cat(ys), 1e-5)
    for r, slot in enumerate(slots.tolist()):
        if flush[r]:
            _close(b.pool.state[slot], states[r][0], 1e-5)


@pytest.mark.parametrize("storage, bound", [("fp32", 1e-5), ("bf16", 2e-2)])
def test_native_gdn(vllm, device: torch.device, storage: str, bound: float) -> None:
    """The bound of bf16 is wide because Triton's interpreter truncates to it."""
    op, g = registry.OPS["gdn_decode"], LayerGeometry("gdn", 4, 16, 32, 2)
    b = baselines.make(f"native-{storage}", vllm, op, g, 3, device, sets=2, dtype=torch.float32)
    slots, i = b.pool.slots[0].long(), b.pool.inputs[0]
    q, k = (t.double() * gdn.inverse_norm(t.double())[..., None] for t in (i.q, i.k))
    q, k = (t.repeat_interleave(2, 1) for t in (q * 32**-0.5, k))
    y, state = gdn.recurrent_step(
        b.pool.state[slots].double(), q, k, i.v.double(), i.g.double()[..., None], i.beta.double()
    )
    b.launches("mix")[0][0]()
    _close(b.out[:, 0], y, bound)
    _close(b.pool.state[slots], state, bound)
