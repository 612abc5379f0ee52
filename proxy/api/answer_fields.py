"""Writes what answers of several APIs share: log probabilities, and usage beyond each API's own."""

from collections.abc import Sequence
from typing import Any, Final

from hearth.shared.wire_messages import TokenLogprob, Usage

LOGPROB_MIN: Final = -9999.0  # JSON has no infinity


def extra_fields(usage: Usage) -> dict[str, Any]:
    """Return the fields of ours that the usage of every dialect has."""
    return {
        "kv_cache": {
            "cache_hit": usage.cached_tokens > 0,
            "prefix_length": usage.cached_tokens,
            "canonical_length": usage.canonical_tokens,
            "matched_length": usage.matched_tokens,
            "prefilled": usage.prefilled_tokens,
            "source": usage.source,
            "match": usage.match,
            "ttft_ms": usage.ttft_ms,
            "idle_tokens": usage.idle_tokens,
            **({"image_ms": usage.image_ms} if usage.image_tokens else {}),
            "divergence": usage.divergence,
        },
        "speculation": prediction_fields(usage) | {"decode_forwards": usage.decode_forwards},
        **({"warnings": usage.warnings} if usage.warnings else {}),
    }


def prediction_fields(usage: Usage) -> dict[str, int]:
    """Return what came of drafted tokens, in the words of chat completions."""
    return {
        "accepted_prediction_tokens": usage.accepted_prediction_tokens,
        "rejected_prediction_tokens": usage.rejected_prediction_tokens,
    }


def image_fields(usage: Usage) -> dict[str, int]:
    """Return what of the prompt stands for images, in the words of both OpenAI dialects."""
    return {"image_tokens": usage.image_tokens} if usage.image_tokens else {}


def logprob_rows(rows: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return each token with its log probability, and those of its alternatives."""
    return [
        _row(each.token, each.token_bytes, each.logprob)
        | {"top_logprobs": [_row(text, octets, value) for _, text, octets, value in each.top]}
        for each in rows
    ]


def _row(text: str, octets: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(octets), "logprob": max(logprob, LOGPROB_MIN)}
