"""Tells what a turn cost and what the cache did with it, in words."""

from typing import Any, Final

from hearth.commands.chat.answer_stream import Turn
from hearth.commands.server_client import figure
from hearth.commands.stream_client import tokens_of

SPEED_TOKENS_MIN: Final = 16  # as in /metrics: the speed of fewer says nothing
_SOURCES: Final = {"slot": "in a live cache", "ram": "in memory", "ssd": "on disk"}


def footer(turn: Turn) -> str:
    """Return one line about an answer; "" where its usage was not told."""
    tokens = tokens_of("chat", turn.reading)
    if tokens is None:
        return ""
    parts = [f"{tokens.cached:,} tokens kept, {tokens.prefilled:,} read"]
    if turn.first_s is not None:
        parts.append(f"first after {turn.first_s:.2f} s")
    if speed := _speed(turn, tokens.completion):
        parts.append(f"{speed:,.1f} tokens/s")
    return " · ".join(parts)


def why_lines(turn: Turn, session: str, base_url: str) -> list[str]:
    """Return all that is known of what an answer cost, and why."""
    tokens = tokens_of("chat", turn.reading)
    if tokens is None:
        return ["The last answer told no usage."]
    place = _SOURCES.get(tokens.source, "")
    lines = [
        f"prompt   {tokens.prompt:,} tokens: {tokens.cached:,} were kept"
        f"{f' {place}' if place and tokens.cached else ''}, {tokens.prefilled:,} were read",
        f"answer   {tokens.completion:,} tokens in {turn.total_s:.2f} s"
        + (f", the first after {turn.first_s:.2f} s" if turn.first_s is not None else "")
        + (f", then {speed:,.1f}/s" if (speed := _speed(turn, tokens.completion)) else ""),
    ]
    lines += _draft_lines(turn.reading.usage.get("speculation") or {})
    lines += _loss_lines(turn.reading.kv_cache)
    return [*lines, f"more     hearth why {session} --base-url {base_url}"]


def _speed(turn: Turn, completion: int) -> float:
    """Return the tokens a second after the first; 0 where there were too few."""
    if turn.first_s is None or completion < SPEED_TOKENS_MIN or turn.total_s <= turn.first_s:
        return 0.0
    return (completion - 1) / (turn.total_s - turn.first_s)


def _draft_lines(told: dict[str, Any]) -> list[str]:
    right = figure(told, "accepted_prediction_tokens")
    wrong = figure(told, "rejected_prediction_tokens")
    return [f"drafts   {right:,} of {right + wrong:,} were right"] if right + wrong else []


def _loss_lines(told: dict[str, Any]) -> list[str]:
    """Return what was kept for this conversation and had to be read again, and what would help."""
    loss = told.get("divergence") or {}
    if not (lost := figure(loss, "lost")):
        return ["lost     nothing"]
    cause = loss.get("cause") or "not told"
    lines = [f"lost     {lost:,} tokens that were kept had to be read again: {cause}"]
    return [*lines, *([f"helps    {loss['remedy']}"] if loss.get("remedy") else [])]
