"""Translates Anthropic's Messages API: a body to a ParsedRequest, events to its stream."""
