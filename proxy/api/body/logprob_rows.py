"""Writes log probabilities as the APIs of OpenAI and of Ollama have them."""

from collections.abc import Sequence
from typing import Any, Final

from hearth.shared.wire_messages import TokenLogprob

LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


def logprob_rows(rows: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with its log probability, and those of its alternatives."""
    return [
        _row(each.token, each.token_bytes, each.logprob)
        | {"top_logprobs": [_row(text, octets, value) for _, text, octets, value in each.top]}
        for each in rows
    ]


def _row(text: str, octets: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(octets), "logprob": max(logprob, LOGPROB_MIN)}
