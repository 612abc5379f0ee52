"""Remembers conversations: turns as sampled tokens, lines, and why a prompt left its line."""
