"""Computes one model over several processes: rank 0 decides, the others do as they are told."""
