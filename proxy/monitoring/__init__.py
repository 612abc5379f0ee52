"""Tells how the server does: health, models, cache, sessions, metrics, and the dashboard."""
