"""Follows the text of calls in the shape that their tools and their format give it."""
