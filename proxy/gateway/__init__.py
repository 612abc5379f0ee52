"""Runs LiteLLM's proxy app inside ours: the only folder that imports LiteLLM."""
