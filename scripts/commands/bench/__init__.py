"""Measures Hearth beside other servers, and writes what a stranger can repeat."""
