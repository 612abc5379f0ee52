"""Reads the LiteLLM config of the user, and says what its names mean."""
