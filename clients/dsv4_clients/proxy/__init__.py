"""OpenAI-compatible HTTP front of one tritonserver."""
