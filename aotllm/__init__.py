"""aotllm: an ahead-of-time compiler for large language models and an in-flight-batching runtime."""

__version__ = "0.1.0"
