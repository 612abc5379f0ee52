"""Sends requests to workers: keeps a link to each worker, chooses one, and receives the answers."""
