"""Decides which request computes next, and how much memory and time it gets."""
