"""Reads the images that requests name, and puts them into prompts."""
