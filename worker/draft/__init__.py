"""Drafts what an answer may say next, from text that was read or written. It knows no tensors."""
