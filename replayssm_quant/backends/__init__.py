"""Inference engines whose recurrent layers run on a split state: transformers (``hf``)."""
