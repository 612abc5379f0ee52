"""Handles HTTP itself: API keys, origins, body limits, replies, connection timeouts."""
