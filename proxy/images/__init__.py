"""Decodes or fetches the images of requests, and puts them into prompts."""
