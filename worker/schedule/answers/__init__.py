"""Drafts for answers, and tells clients what they say."""
