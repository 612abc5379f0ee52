"""Moves kept KV between workers that share no directory: tells it, seeks it, sends and takes it."""
