"""Decodes images, runs the model's processor, and puts the tokens of images into prompts."""
