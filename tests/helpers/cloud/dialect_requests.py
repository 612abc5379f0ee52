"""Sends one request in each dialect and reads what came back, whole or as a stream."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

DIALECTS: Final = ("chat", "messages", "responses", "completions")
PATHS: Final = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "completions": "/v1/completions",
}
WAIT_S_MAX: Final = 60.0


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
        return "".join(_texts(self.dialect, self.rows))

    @property
    def error(self) -> str:
        """The message of the error that the answer is, or ends with; "" where it is none."""
        return next(filter(None, map(_error_of, reversed(self.rows))), "")

    @property
    def usage(self) -> tuple[int, int, int]:
        """Prompt, cached and completion tokens, the cached ones within the prompt."""
        told = [usage for row in self.rows if (usage := _usage_of(row))]
        merged: dict[str, Any] = {}
        for usage in told:
            merged |= {name: each for name, each in usage.items() if each is not None}
        if "prompt_tokens" in merged:
            details = merged.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            return merged["prompt_tokens"], cached, merged["completion_tokens"]
        if self.dialect == "messages":
            cached = merged.get("cache_read_input_tokens", 0)
            made = merged.get("cache_creation_input_tokens", 0)
            return merged["input_tokens"] + cached + made, cached, merged["output_tokens"]
        cached = (merged.get("input_tokens_details") or {}).get("cached_tokens") or 0
        return merged["input_tokens"], cached, merged["output_tokens"]


def body_of(dialect: str, model: str, text: str, **more: Any) -> dict[str, Any]:
    """Return the least body that asks `text` in `dialect`."""
    rows = [{"role": "user", "content": text}]
    asked: dict[str, dict[str, Any]] = {
        "chat": {"messages": rows},
        "messages": {"messages": rows, "max_tokens": 200},
        "responses": {"input": text},
        "completions": {"prompt": text},
    }
    return {"model": model, **asked[dialect], **more}


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
    with httpx.Client(timeout=WAIT_S_MAX) as client:
        place = url + PATHS[dialect] + query
        with client.stream("POST", place, json=dict(body), headers=headers) as told:
            raw = ""
            for piece in _until_the_end(told):
                raw += piece
                on_read(raw)
    is_stream = told.headers.get("content-type", "").startswith("text/event-stream")
    rows = list(_events(raw) if is_stream else _whole(raw))
    return DialectAnswer(dialect, told.status_code, told.headers, raw, rows)


def _until_the_end(told: httpx.Response) -> Iterator[str]:
    try:
        yield from told.iter_text()
    except httpx.RemoteProtocolError as error:
        yield f"\n: broken off: {error}\n"


def _whole(raw: str) -> Iterator[dict[str, Any]]:
    if raw.strip():
        yield dict(json.loads(raw))


def _events(raw: str) -> Iterator[dict[str, Any]]:
    for line in raw.splitlines():
        if line.startswith("data: {"):
            yield dict(json.loads(line.removeprefix("data: ")))


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


def _error_of(row: dict[str, Any]) -> str:
    response = row.get("response")
    told = row.get("error") or (response.get("error") if isinstance(response, dict) else None)
    if told is None and row.get("type") == "error":
        told = row
    return str(told.get("message") or told) if isinstance(told, dict) else str(told or "")


def _usage_of(row: dict[str, Any]) -> dict[str, Any]:
    inner = row.get("message") or row.get("response")
    told = row.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
    return told or {}
