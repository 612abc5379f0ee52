"""Holds the threads of a worker, and the queues between them."""
