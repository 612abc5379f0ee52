"""Loads LoRA adapters of the model, and applies them in the forwards of their requests."""
