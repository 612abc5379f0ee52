"""Parses tool calls in every form that models write, and makes their arguments strict JSON."""
