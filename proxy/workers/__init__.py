"""Starts, watches and restarts worker processes, and decides which model each of them has."""
