"""Text in, text out: the OpenAI-compatible front door, which owns a request until its end."""
