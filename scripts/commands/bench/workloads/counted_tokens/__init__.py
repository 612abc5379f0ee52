"""Workloads that count what is read; their answers are one token long, but for `live`."""
