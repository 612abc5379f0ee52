"""Constrains answers to a JSON schema, to tool calls or to a thinking budget, token by token."""
