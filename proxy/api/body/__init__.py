"""Reads the parts of a request body that several APIs share."""
