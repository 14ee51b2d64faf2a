"""Number formats of recurrent states: one table, and how to encode and decode it."""

from .spec import ALIASES, ELEMENTS, FORMATS, Format, ScaleSpec, parse_format, with_scale

__all__ = ["ALIASES", "ELEMENTS", "FORMATS", "Format", "ScaleSpec", "parse_format", "with_scale"]
