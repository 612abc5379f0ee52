"""Handles HTTP itself: keys, origins, bodies within limits, replies, connection timeouts."""
