"""Remembers turns (as sampled tokens) and conversation lines, and why a prompt left its line."""
