"""Keeps KV as files that are found by chain hash. Knows no MLX and no policy of reuse."""
