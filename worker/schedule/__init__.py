"""Decides which request computes next, and how much memory and time each request gets."""
