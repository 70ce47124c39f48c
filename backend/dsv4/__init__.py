"""DeepSeek V4 Flash serving: the engine and everything that runs beside Triton Inference Server."""

__version__ = "0.1.0"
