"""Holds what proxy and worker both use: wire messages, sockets, settings, journals, processes."""
