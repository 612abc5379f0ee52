"""Speaks Ollama's API: reads its bodies, writes its answers, lists the models."""
