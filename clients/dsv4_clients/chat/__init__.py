"""Terminal chat with any OpenAI-compatible server."""
