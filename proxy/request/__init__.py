"""Holds a parsed request, and finds its model, its session and the digests of its messages."""
