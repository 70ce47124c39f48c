"""Load generator for OpenAI-compatible servers."""
