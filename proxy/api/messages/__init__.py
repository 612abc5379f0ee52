"""Translates Anthropic's Messages API: its body to our request, our events to its stream."""
