"""Translates OpenAI's chat completions: a body to a ParsedRequest, events to chunks."""
