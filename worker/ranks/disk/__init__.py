"""Keeps KV files over ranks: each rank has files of its own under the same names."""
