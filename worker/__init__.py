"""Runs the model: all code of a worker process."""
