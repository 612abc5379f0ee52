"""Starts, watches and restarts worker processes, and decides which model each worker loads."""
