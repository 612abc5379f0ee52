"""Drafts the next tokens of an answer, from its prompt and earlier text. It knows no tensors."""
