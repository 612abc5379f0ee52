"""Parses the body of any dialect, and shows what it became."""

import dataclasses
from typing import Any, Final

import orjson

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.request.parsed_request import Dialect, ParsedRequest
from hearth.shared.wire_messages import Prompt

_HI: Final = [{"role": "user", "content": "hi"}]
BASES: Final[dict[str, dict[str, Any]]] = {
    "chat": {"model": "m", "messages": _HI},
    "completions": {"model": "m", "prompt": "Once"},
    "messages": {"model": "m", "messages": _HI, "max_tokens": 10},
    "responses": {"model": "m", "input": "hi"},
    "ollama_chat": {"model": "m", "messages": _HI},
    "ollama_generate": {"model": "m", "prompt": "hi"},
}


def read(dialect: Dialect, **body: Any) -> ParsedRequest:
    """Return what the dialect's plainest body becomes with `body` over it."""
    return DIALECTS[dialect].parse(BASES[dialect] | body)


def prompt_of(dialect: Dialect, *rows: dict[str, Any], **fields: Any) -> Prompt:
    """Return the prompt of a body of the messages, or input items, `rows`."""
    place = "input" if dialect == "responses" else "messages"
    return read(dialect, **{place: list(rows)}, **fields).prompt


def shown(request: ParsedRequest) -> dict[str, Any]:
    """Return the request's own fields and its prompt's, as JSON; of rules what they change."""
    prompt = request.prompt
    told = {name: getattr(prompt, name) for name in PROMPT_FIELDS}
    told |= {name: getattr(request, name) for name in REQUEST_FIELDS}
    told["raw"] = [row.prompt.text or row.prompt.ids for row in request.submissions()]
    told["sampling"] = changed(request.sampling)
    told["constraints"] = changed(request.constraints)
    told["thinking"] = changed(prompt.thinking)
    return dict(orjson.loads(orjson.dumps(told)))


PROMPT_FIELDS: Final = ("messages", "tools", "deferred", "template_kwargs", "continues")
REQUEST_FIELDS: Final = ("stream", "left_out", "choices", "prefill_only", "prediction")


def changed(rules: Any) -> dict[str, Any]:
    """Return the fields in which `rules` are not what they are by default."""
    plain = dataclasses.asdict(type(rules)())
    return {k: v for k, v in dataclasses.asdict(rules).items() if v != plain[k]}
