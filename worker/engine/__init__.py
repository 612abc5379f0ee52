"""Loads the model, prefills, decodes, samples and encodes images. Knows tokens, not chat."""
