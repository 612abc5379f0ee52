"""Commands for a model that several machines compute together."""
