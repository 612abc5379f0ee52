"""Says from a model's files alone whether it fits into this machine's memory."""
