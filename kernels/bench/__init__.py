"""Correctness gate and timing of the decode kernels (``python -m`` this package)."""
