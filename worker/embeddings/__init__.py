"""The process that embeds texts and ranks documents, apart from the chat models."""
