"""Turns what clients ask into rendered requests, in the prompt threads: no MLX, no sockets."""
