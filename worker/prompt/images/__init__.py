"""Decodes images, runs the model's processor on them, and puts their tokens into prompts."""
