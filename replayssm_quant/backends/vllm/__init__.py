"""vLLM backend: an out-of-tree plugin that stores the recurrent state split. See ``plugin``."""
