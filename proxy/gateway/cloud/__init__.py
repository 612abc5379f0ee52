"""Carries requests to other servers and replies back: allowed fields, crossings, one call."""
