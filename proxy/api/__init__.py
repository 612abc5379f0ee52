"""Translates each HTTP API: its bodies to ParsedRequests, a worker's events to its answers."""
