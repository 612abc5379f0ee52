"""Moves KV between live slots, memory and disk: the layer that touches MLX arrays."""
