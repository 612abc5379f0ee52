"""Replays captured sessions of agents."""
