"""Runs the model: everything of a worker process."""
