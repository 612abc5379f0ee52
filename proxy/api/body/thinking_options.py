"""Reads how much the model may think from the many fields in which clients say it.

A chat template knows `enable_thinking`, or a level in `reasoning_effort`, or neither; the budget is
the worker's. Of what a body says twice, the field that comes first in `_READERS` holds, and what
stands at the top before what is nested in `extra_body` or `metadata`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body
from hearth.shared.errors import RequestError

BUDGET_MAX: Final = 2**31 - 1
_NESTED: Final = ("extra_body", "metadata")
_OFF: Final = ("off", "none", "disabled", "false")
_ON: Final = ("on", "enabled", "adaptive", "between_tools", "auto", "true")
_LEAST: Final = "low"
# A client's word -> the nearest level that templates know; they raise for any other.
_LEVELS: Final = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """A request's wishes about thinking; empty where the client left it open."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)  # for the chat template
    budget: int | None = None  # tokens, >= 0


@dataclass(frozen=True, slots=True)
class _ThinkingFields:
    """The wishes of one field; None where it has none."""

    on: bool | None = None
    level: str | None = None
    budget: int | None = None


def read(body: Body) -> ThinkingOptions:
    """Return what `body` says.

    Raises:
        RequestError: a field at its top is not what an API allows. Nested ones are not an API's:
            what is not understood there is passed over.
    """
    said = list(_said(body, strict=True))
    given = dict(fields.optional_record(body, "chat_template_kwargs"))
    for name in _NESTED:
        nested = body.get(name)
        if type(nested) is dict:
            said += _said(nested, strict=False)
            options = nested.get("chat_template_kwargs")
            given = (options if type(options) is dict else {}) | given
    on = next((row.on for row in said if row.on is not None), None)
    level = next((row.level for row in said if row.level is not None), None)
    budget = next((row.budget for row in said if row.budget is not None), None)
    if on is False and level is not None:
        level = _LEAST  # where a template knows levels only
    kwargs = ({} if level is None else {"reasoning_effort": level}) | given
    if on is not None:
        kwargs["enable_thinking"] = on
    return ThinkingOptions(kwargs, None if on is False else budget)


def _said(body: Body, *, strict: bool) -> Iterator[_ThinkingFields]:
    for name, reader in _READERS:
        value = body.get(name)
        if value is None:
            continue
        try:
            yield reader(value, name)
        except RequestError:
            if strict:
                raise


def _options(value: Any, param: str) -> _ThinkingFields:
    """Read what is for the template itself: a word of its own is its own business."""
    options = fields.record(value, param)
    for name in ("enable_thinking", "thinking"):
        said = options.get(name)
        if type(said) is bool or (type(said) is str and said.lower() in (*_OFF, *_ON)):
            return _word(said, f"{param}.{name}")
    return _ThinkingFields()


def _word(value: Any, param: str) -> _ThinkingFields:
    """Read true or false, a level, or one of the words for on and off."""
    if type(value) is bool:
        return _ThinkingFields(value)
    word = value.lower() if type(value) is str else ""
    if word in _ON:
        return _ThinkingFields(True)
    if word in _OFF:
        return _ThinkingFields(False, _LEAST)
    if word in _LEVELS:
        return _ThinkingFields(True, _LEVELS[word])
    fields.refuse(param, value, "true, false, on, off, none or one of " + ", ".join(_LEVELS))


def _level(value: Any, param: str) -> _ThinkingFields:
    if value == "":
        return _ThinkingFields()
    word = value.lower() if type(value) is str else ""
    if word not in _LEVELS and word not in _OFF:
        fields.refuse(param, value, "none, " + ", ".join(_LEVELS))
    return _word(word, param)


def _control(value: Any, param: str) -> _ThinkingFields:
    """Read a word, Anthropic's {type, budget_tokens} or {enabled, effort, level, max_tokens}."""
    if type(value) is not dict:
        return _word(value, param)
    parts = [
        reader(value[name], f"{param}.{name}")
        for name, reader in _CONTROLS
        if value.get(name) is not None
    ]
    return _ThinkingFields(
        next((part.on for part in parts if part.on is not None), None),
        next((part.level for part in parts if part.level is not None), None),
        next((part.budget for part in parts if part.budget is not None), None),
    )


def _kind(value: Any, param: str) -> _ThinkingFields:
    if value not in ("enabled", "adaptive", "auto", "between_tools", "disabled"):
        fields.refuse(param, value, "enabled, adaptive, auto, between_tools or disabled")
    return _word(value, param)


def _output_config(value: Any, param: str) -> _ThinkingFields:
    """Read Anthropic's effort: it says how hard to work, not whether to think."""
    effort = fields.record(value, param).get("effort")
    return (
        _ThinkingFields()
        if effort is None
        else _ThinkingFields(None, _level(effort, f"{param}.effort").level)
    )


def _budget(value: Any, param: str) -> _ThinkingFields:
    """Read a number of tokens: 0 is none at all, -1 as many as it takes."""
    tokens = fields.integer({param: value}, param, -1, BUDGET_MAX)
    assert tokens is not None, param
    return _ThinkingFields(tokens != 0, None, tokens if tokens >= 0 else None)


_Reader = Callable[[Any, str], _ThinkingFields]  # (value, its name for errors); raises RequestError
_CONTROLS: Final[tuple[tuple[str, _Reader], ...]] = (
    ("enabled", _word),
    ("type", _kind),
    ("effort", _level),
    ("level", _level),
    ("budget_tokens", _budget),
    ("max_tokens", _budget),
)
_READERS: Final[tuple[tuple[str, _Reader], ...]] = (
    ("chat_template_kwargs", _options),
    ("enable_thinking", _word),
    ("thinking", _control),
    ("think", _word),  # Ollama's
    ("reasoning_effort", _level),
    ("reasoning", _control),
    ("output_config", _output_config),
    ("thinking_budget", _budget),
    ("thinking_token_budget", _budget),
    ("thinking_budget_tokens", _budget),
)
