"""Keep the checkout's top-level folders from being taken for other packages."""

import sys
from pathlib import Path


def drop_checkout() -> None:
    """Remove the repository root from ``sys.path``; does nothing in an installed wheel.

    ``python -m`` and pytest put the working directory on ``sys.path``, so in a checkout the bare
    folder ``kernels/`` becomes importable and transformers takes it for Hugging Face's ``kernels``
    package. Submodules of this package still resolve, through its own ``__path__``.
    """
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != root]
