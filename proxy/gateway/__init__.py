"""Holds all code for LiteLLM; only this folder may import LiteLLM."""
