"""Translates OpenAI's legacy completions, in which the answer continues a raw prompt."""
