"""ddtree-patch: bring a stock SGLang on a GPU host to exact DDTree speculative sampling, and back."""

__version__ = "0.1.0"
