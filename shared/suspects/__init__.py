"""Remembers which requests a worker died with, for who survives it."""
