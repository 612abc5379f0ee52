"""Workloads about what outlives a start, and what a server keeps, writes and answers alike."""
