"""Translates each HTTP API: its bodies to our requests, our events to its answers."""
