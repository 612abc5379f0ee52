"""Keeps KV as files, found by chained hashes. Imports no MLX and decides no reuse."""
