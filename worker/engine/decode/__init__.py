"""Decodes sequences, alone with drafts or in batches on shared trunks, and samples their tokens."""
