"""Translates OpenAI's legacy completions, whose prompt is raw and whose text continues it."""
