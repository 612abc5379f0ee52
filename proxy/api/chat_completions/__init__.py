"""Translates OpenAI's chat completions: their body to our request, our events to their chunks."""
