"""Loads models that see, and encodes images and videos for them."""
