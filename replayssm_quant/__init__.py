"""Split-precision recurrent state: decode reads a low-bit copy, updates go to a checkpoint."""

__version__ = "0.1.0"

__all__ = ["__version__"]
