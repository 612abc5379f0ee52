"""Computes one model over several processes: rank 0 decides, the followers do its operations."""
