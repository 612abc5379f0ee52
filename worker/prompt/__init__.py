"""Builds prompts: messages through the chat template to token ids, and where prefill cuts them."""
