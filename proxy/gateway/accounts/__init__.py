"""Tells LiteLLM what answers cost and whose they are, and asks it whose a key is."""
