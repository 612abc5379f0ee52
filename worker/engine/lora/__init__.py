"""LoRA adapters of the model: their files, their layers, and who has them in a forward."""
