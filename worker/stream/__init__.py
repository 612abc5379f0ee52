"""Splits what a model writes into reasoning, content and tool calls, while it is generated."""
