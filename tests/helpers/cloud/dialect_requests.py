"""Sends one request in each dialect and reads what came back, whole or as a stream."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import pytest

PATHS: Final = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
DIALECTS: Final = tuple(PATHS)
WAYS: Final = [(name, on) for name in PATHS for on in (False, True)]
in_each_way: Final = pytest.mark.parametrize(("dialect", "stream"), WAYS)
# One dialect by day, for what is decided before the dialect matters.
by_night_in_each_way: Final = pytest.mark.parametrize(
    ("dialect", "stream"),
    [
        pytest.param(name, on, marks=() if name == "chat" else pytest.mark.night)
        for name, on in WAYS
    ],
)


@dataclass(frozen=True)
class DialectAnswer:
    """One answer as a client sees it."""

    dialect: str
    status: int
    headers: httpx.Headers
    raw: str
    rows: list[dict[str, Any]] = field(repr=False)  # the body, or each event's data

    @property
    def served_by(self) -> str:
        return str(self.headers.get("x-hearth-served-by", ""))

    @property
    def fallback(self) -> str:
        return str(self.headers.get("x-hearth-fallback", ""))

    @property
    def text(self) -> str:
        return "".join(_texts(self.dialect, self.rows)).strip()

    @property
    def error(self) -> str:
        """The message of the error that the answer is, or ends with; "" where it is none."""
        return next(filter(None, map(_error_of, reversed(self.rows))), "")

    @property
    def usage(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens, the cached ones within the prompt."""
        told: dict[str, Any] = {}
        for row in self.rows:
            usage = row.get("usage") or _inner(row).get("usage") or {}
            told |= {name: each for name, each in usage.items() if each is not None}
        if self.dialect == "messages":
            cached = told.get("cache_read_input_tokens", 0)
            made = told.get("cache_creation_input_tokens", 0)
            return told["input_tokens"] + cached + made, cached, told["output_tokens"]
        names = ("input", "output") if "input_tokens" in told else ("prompt", "completion")
        details = told.get(f"{names[0]}_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        return told[f"{names[0]}_tokens"], cached, told[f"{names[1]}_tokens"]


def body_of(dialect: str, model: str, text: Any, **more: Any) -> dict[str, Any]:
    """Return the least body that asks `text` in `dialect`."""
    rows = [{"role": "user", "content": text}]
    asked: dict[str, dict[str, Any]] = {
        "chat": {"messages": rows},
        "messages": {"messages": rows, "max_tokens": 200},
        "responses": {"input": text if isinstance(text, str) else rows},
        "completions": {"prompt": text},
    }
    return {"model": model, **asked[dialect], **more}


def with_usage(dialect: str, stream: bool) -> dict[str, Any]:
    """Return the fields of a request whose answer is to end with its usage."""
    is_asked = stream and dialect in ("chat", "completions")
    return {"stream": stream, **({"stream_options": {"include_usage": True}} if is_asked else {})}


def ask(
    url: str,
    dialect: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    query: str = "",
    on_read: Callable[[str], object] = str,
) -> DialectAnswer:
    """POST `body` and read the answer to its end, also one that breaks off.

    `on_read` gets all that was read whenever there is more of it.
    """
    place, raw = url + PATHS[dialect] + query, ""
    with httpx.stream("POST", place, json=dict(body), headers=headers, timeout=60) as told:
        try:
            for piece in told.iter_text():
                raw += piece
                on_read(raw)
        except httpx.RemoteProtocolError as error:
            raw += f"\n: broken off: {error}\n"
    is_stream = told.headers.get("content-type", "").startswith("text/event-stream")
    lines = raw.splitlines() if is_stream else [f"data: {raw}"]
    rows = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return DialectAnswer(dialect, told.status_code, told.headers, raw, rows)


def _texts(dialect: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for choice in row.get("choices") or ():
            said = choice.get("message") or choice.get("delta") or {}
            yield said.get("content") or choice.get("text") or ""
        if dialect == "messages":
            yield from (block.get("text", "") for block in row.get("content") or ())
            yield (row.get("delta") or {}).get("text", "")
        if dialect == "responses":
            if row.get("type") == "response.output_text.delta":
                yield row["delta"]
            for item in row.get("output") or ():
                yield from (part.get("text", "") for part in item.get("content") or ())


def _inner(row: dict[str, Any]) -> dict[str, Any]:
    """Return the message or response that an event is about."""
    inner = row.get("message") or row.get("response")
    return inner if isinstance(inner, dict) else {}


def _error_of(row: dict[str, Any]) -> str:
    told = row.get("error") or _inner(row).get("error")
    told = row if told is None and row.get("type") == "error" else told
    return str(told.get("message") or told) if isinstance(told, dict) else str(told or "")
