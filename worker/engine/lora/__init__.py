"""Loads the model's LoRA adapters, and applies each in the forwards of its requests."""
