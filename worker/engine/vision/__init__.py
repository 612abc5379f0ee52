"""Loads vision models, and encodes images and videos for them."""
