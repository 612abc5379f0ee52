"""Tells errors of legacy completions, which are those of chat completions."""

from hearth.proxy.api.chat_completions.errors import error_body, error_event

__all__ = ["error_body", "error_event"]
