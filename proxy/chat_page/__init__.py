"""Serves the chat page at `/`, and accepts the page's API calls by its sign-in cookie."""
