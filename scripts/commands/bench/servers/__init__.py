"""The servers that `hearth bench` measures."""
