"""Builds prompts: renders messages to token ids, and decides where a prefill is cut."""
