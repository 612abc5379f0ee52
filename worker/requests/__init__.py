"""Turns what clients ask into rendered requests, in the prompt thread: no MLX, no sockets."""
