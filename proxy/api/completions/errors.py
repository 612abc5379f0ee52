"""Writes errors of legacy completions, which have the form of chat completions' errors."""

from hearth.proxy.api.chat_completions.errors import error_body, error_event

__all__ = ["error_body", "error_event"]
