"""Holds all that is LiteLLM's: the only folder that may import it."""
