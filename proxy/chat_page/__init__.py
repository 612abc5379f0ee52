"""Serves the page to talk at `/`, and takes its calls of the API by the cookie of a sign-in."""
