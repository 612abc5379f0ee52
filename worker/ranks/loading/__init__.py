"""Loads one rank's part of a model, and compares what the ranks have loaded."""
