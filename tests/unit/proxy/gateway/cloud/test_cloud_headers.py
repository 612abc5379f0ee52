"""A cloud model is sent those of a client's headers that LiteLLM does not act upon."""

import pytest

from hearth.proxy.gateway.cloud.cloud_bodies import HEADER_CHARS_MAX, cloud_headers


def test_headers_that_litellm_acts_upon_stay_behind() -> None:
    given = {
        "content-type": "text/plain",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "context-1m-2025-08-07,interleaved-thinking-2025-05-14",
        "user-agent": "claude-cli/2.1.0 (external, cli)",
        "authorization": "Bearer sk",
        "x-api-key": "sk",
        "x-litellm-api-key": "sk",
        "x-litellm-tags": "a",
        "x-litellm-timeout": "1",
        "x-litellm-model": "m",
        "x-pass-x": "y",
        "langfuse_trace_id": "t",
        "openai-organization": "o",
        "cache-control": "no-store",
        "traceparent": "00-1-2-3",
        "cookie": "c",
        "host": "h",
    }
    assert cloud_headers(given) == [
        (b"content-type", b"application/json"),
        (b"anthropic-version", b"2023-06-01"),
        (b"anthropic-beta", b"context-1m-2025-08-07,interleaved-thinking-2025-05-14"),
        (b"user-agent", b"claude-cli/2.1.0 (external, cli)"),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("anthropic-version", "latest"),
        ("anthropic-beta", "a\r\nx-api-key: b"),
        ("anthropic-beta", "a, , b"),
        ("anthropic-beta", "a" * (HEADER_CHARS_MAX + 1)),
        ("user-agent", "a\n"),
        ("user-agent", "caf\xe9"),
        ("user-agent", ""),
    ],
)
def test_odd_values_of_headers_stay_behind(name: str, value: str) -> None:
    assert cloud_headers({name: value}) == [(b"content-type", b"application/json")]
