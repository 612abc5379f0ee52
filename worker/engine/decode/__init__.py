"""Decodes: alone with drafts, in batches, on trunks; samples what comes next."""
