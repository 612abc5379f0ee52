"""Reports how the server is doing: health, models, cache, sessions, metrics, and the dashboard."""
