"""Embeds texts and ranks documents, in a process apart from the chat models."""
