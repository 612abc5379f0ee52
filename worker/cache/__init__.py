"""Decides which KV is kept, found, reused and evicted. Has no tensors and no files."""
