"""Checks on this machine and model what the cache relies on, and says what was found."""
