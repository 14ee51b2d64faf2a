"""vLLM's own decode kernels, loaded from its wheel's files at run time; nothing of vLLM is copied
here.

``load(path)`` takes vLLM's wheel, a folder that holds its package ``vllm/`` (an unpacked wheel, or
just the files of ``FILES``), or None for an installed vLLM. The kernels need only Triton: from a
path they are imported among small stand-ins for the parts of vLLM around them (platform, logger,
settings), which leave ``sys.modules`` again, so that nobody takes vLLM for installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_MAMBA = "vllm.model_executor.layers.mamba.ops"
_FLA = "vllm.third_party.flash_linear_attention.ops"
MODULES = (
    f"{_MAMBA}.triton_helpers",
    f"{_MAMBA}.replayssm_config",
    f"{_MAMBA}.mamba_ssm",
    f"{_MAMBA}.selective_state_update_replayssm_output_only",
    f"{_FLA}.utils",
    f"{_FLA}.op",
    f"{_FLA}.fused_recurrent",
)
FILES = tuple(m.replace(".", "/") + ".py" for m in MODULES) + ("vllm/_version.py",)
"""Files of the wheel that the baselines are made of, as paths inside it."""


@dataclass(frozen=True)
class Baselines:
    """vLLM's functions, its version, and the two hooks that pin their launch configurations.

    override_native((BLOCK_SIZE_M, num_warps)) and override_replay((BLOCK_SIZE_M, num_warps, tile
    of d_state without a flush, tile at a flush, num_stages)) are context managers.
    """

    version: str
    selective_state_update: Callable[..., Any]
    replay_output_only: Callable[..., Any]
    gdn_packed_decode: Callable[..., Any]
    override_native: Callable[[tuple[int, int]], contextlib.AbstractContextManager[Any]]
    override_replay: Callable[[tuple[int, ...]], contextlib.AbstractContextManager[Any]]


class _Platform:
    """What the kernel files ask of ``vllm.platforms.current_platform``, for a CUDA GPU or none."""

    device_type = "cuda"
    device_name = "cuda"

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return False

    @staticmethod
    def _capability(device_id: int) -> int:
        import torch

        if not torch.cuda.is_available():
            return 0
        major, minor = torch.cuda.get_device_capability(device_id)
        return 10 * major + minor

    def is_device_capability_family(self, capability: int, device_id: int | None = 0) -> bool:
        return self._capability(device_id or 0) // 10 == capability // 10

    def is_device_capability(self, capability: int, device_id: int | None = 0) -> bool:
        return self._capability(device_id or 0) == capability

    def has_device_capability(self, capability: int, device_id: int | None = 0) -> bool:
        return self._capability(device_id or 0) >= capability

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return torch.cuda.get_device_name(device_id) if torch.cuda.is_available() else "cpu"


class _Logger:
    """A logger with vLLM's ``*_once`` methods that says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


def _stand_ins() -> dict[str, ModuleType]:
    import triton
    import triton.language as tl
    import triton.language.extra.libdevice as tldevice

    platform = _Platform()
    return {
        "vllm.envs": _module("vllm.envs", VLLM_TUNED_CONFIG_FOLDER=None),
        "vllm._custom_ops": _module("vllm._custom_ops"),
        "vllm.logger": _module("vllm.logger", init_logger=lambda name: _Logger()),
        "vllm.platforms": _module("vllm.platforms", current_platform=platform),
        "vllm.triton_utils": _module(
            "vllm.triton_utils", HAS_TRITON=True, triton=triton, tl=tl, tldevice=tldevice
        ),
        "vllm.utils.platform_utils": _module(
            "vllm.utils.platform_utils",
            get_device_name_as_file_name=lambda: platform.get_device_name().replace(" ", "_"),
        ),
        "vllm.v1.attention.backends.utils": _module(
            "vllm.v1.attention.backends.utils", NULL_BLOCK_ID=0
        ),
    }


def _packages(root: Path) -> dict[str, ModuleType]:
    """Empty packages for every parent of what is loaded; their paths lead into ``root``."""
    found: dict[str, ModuleType] = {}
    for name in (*MODULES, *_stand_ins()):
        parts = name.split(".")[:-1]
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            package = found.setdefault(parent, ModuleType(parent))
            package.__path__ = [str(root / parent.replace(".", "/"))]
    return found


@contextlib.contextmanager
def _borrowed_modules(root: Path) -> Iterator[None]:
    """Put stand-ins and packages in ``sys.modules``, and take everything named vllm out again."""

    def ours() -> list[str]:
        return [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]

    kept = {name: sys.modules.pop(name) for name in ours()}
    sys.modules.update(_packages(root) | _stand_ins())
    try:
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(kept)


def _import(root: Path) -> dict[str, ModuleType]:
    with _borrowed_modules(root):
        return {name: importlib.import_module(name) for name in MODULES}


def _version(root: Path) -> str:
    path = root / "vllm/_version.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    match = re.search(r"^__version__ = version = '([^']+)'", text, re.MULTILINE)
    return match[1] if match else "unknown"


def extract(wheel: Path, target: Path) -> None:
    """Unpack the files that ``load`` needs from vLLM's wheel into ``target``.

    Raises ValueError for an archive that lacks one of them.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        missing = [f for f in FILES if f not in names]
        if missing:
            raise ValueError(
                f"{wheel.name} has no {missing[0]}; the baselines are written for vLLM 0.33"
            )
        for name in FILES:
            archive.extract(name, target)


@contextlib.contextmanager
def _override_replay(config_module: ModuleType, config: tuple[int, ...]) -> Iterator[None]:
    overrides, key = config_module._overrides, "mamba2_output_only"
    before = overrides.get(key)
    overrides[key] = config
    try:
        yield
    finally:
        if before is None:
            del overrides[key]
        else:
            overrides[key] = before


def load(path: Path | str | None) -> Baselines:
    """vLLM's decode functions from a wheel, a folder with ``vllm/`` in it, or the installation.

    Raises ValueError where they are not found.
    """
    if path is None:
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed; give its 0.33 wheel or unpacked folder")
        modules = {name: importlib.import_module(name) for name in MODULES}
        version = importlib.import_module("vllm").__version__
    else:
        root = Path(path).resolve()
        if root.is_file():
            unpacked = Path(tempfile.mkdtemp(prefix="vllm_ops_"))  # Triton reads the source later
            extract(root, unpacked)
            root = unpacked
        lacking = [f for f in FILES[:-1] if not (root / f).is_file()]
        if lacking:
            raise ValueError(
                f"{path} has no {lacking[0]}; give vLLM's wheel or the folder that holds 'vllm/'"
            )
        modules, version = _import(root), _version(root)
    mamba, replay = modules[f"{_MAMBA}.mamba_ssm"], modules[f"{_MAMBA}.replayssm_config"]
    output_only = modules[f"{_MAMBA}.selective_state_update_replayssm_output_only"]
    recurrent = modules[f"{_FLA}.fused_recurrent"]
    return Baselines(
        version=version,
        selective_state_update=mamba.selective_state_update,
        replay_output_only=output_only.selective_state_update_replayssm_output_only,
        gdn_packed_decode=recurrent.fused_recurrent_gated_delta_rule_packed_decode,
        override_native=mamba.override_ssm_config,
        override_replay=lambda config: _override_replay(replay, config),
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Unpack the files of vLLM's wheel that the benchmark's baselines need."
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args(argv)
    extract(args.wheel, args.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
