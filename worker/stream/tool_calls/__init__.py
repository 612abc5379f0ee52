"""Parses tool calls in each form that models write them, and makes their arguments strict JSON."""
