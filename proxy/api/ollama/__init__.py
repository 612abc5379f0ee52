"""Speaks Ollama's API: reads its bodies, writes its answers, tells what models are here."""
