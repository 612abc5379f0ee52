"""Hands requests to workers: a link to each, the choice among them, their answers as they come."""
