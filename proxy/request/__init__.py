"""Holds a request in our own types: its fields, model, session, and the names of its messages."""
