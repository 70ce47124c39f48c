"""PyPTO's NPU engine behind our engine protocol."""
