"""Plays what agents do on the servers that `hearth bench` measures."""
