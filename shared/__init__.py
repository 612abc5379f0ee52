"""Contains the code that proxy and worker share: wire messages, sockets, settings, journals."""
