"""Decides which KV is kept, found, resumed from and evicted. Has no tensors and no files."""
