"""Embeddings and reranking: routes, and the process that computes them."""
