"""Loads the model, prefills, decodes, samples and encodes images. It knows tokens, not chats."""
