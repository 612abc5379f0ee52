"""Decides which request computes next, and within which memory and time."""
