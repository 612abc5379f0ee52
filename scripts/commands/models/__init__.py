"""Lists, fetches and removes models for `hearth models`, `hearth pull` and `hearth rm`."""
