"""Checks the assumptions of the cache on this machine and model, and reports the findings."""
