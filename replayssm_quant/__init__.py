"""Split-precision recurrent state: decode reads a low-bit copy, updates go to a checkpoint."""

from .config import StateConfig
from .formats import parse_format

__version__ = "0.1.0"

__all__ = ["StateConfig", "__version__", "parse_format"]
