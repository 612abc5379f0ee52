"""Reads how much the model may think from the many fields in which clients say it.

What the model's template makes of it is the worker's to know. Of what a body says twice, the field
that comes first in `_READERS` holds, and what stands at the top before what is nested in
`extra_body` or `metadata`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import TEMPLATE_SWITCHES, THINKING_LEVELS, ThinkingWish

BUDGET_MAX: Final = 2**31 - 1
_NESTED: Final = ("extra_body", "metadata")
_OFF: Final = ("off", "none", "disabled", "false", "no_think")
_ON: Final = ("on", "enabled", "adaptive", "between_tools", "auto", "true")
# A wish may come in `chat_template_kwargs`, too, in a template's words; a budget is no switch here.
_SWITCHES: Final = tuple(name for name, *_ in TEMPLATE_SWITCHES if name != "thinking_budget")
_NAMES: Final = (*_SWITCHES, "reasoning_effort")


def read(body: Body) -> tuple[dict[str, Any], ThinkingWish]:
    """Return what `body` says for the chat template, and what it wishes in words of our own.

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
    wish = _first(said)
    given |= {  # a template takes "false" for true
        each: wish.on
        for each in _SWITCHES[:2]
        if _options({each: given.get(each)}, each).on is not None
    }
    if given.get("reasoning_effort") in _OFF:  # templates have other words, or raise
        del given["reasoning_effort"]
    return given, ThinkingWish(False) if wish.on is False else wish


def _first(said: list[ThinkingWish]) -> ThinkingWish:
    """Return what is `said` as one wish: of each field the first that is there."""
    return ThinkingWish(
        next((each.on for each in said if each.on is not None), None),
        next((each.level for each in said if each.level is not None), None),
        next((each.budget for each in said if each.budget is not None), None),
    )


def _said(body: Body, *, strict: bool) -> Iterator[ThinkingWish]:
    for name, reader in _READERS:
        value = body.get(name)
        if value is None:
            continue
        try:
            yield reader(value, name)
        except RequestError:
            if strict:
                raise


def _options(value: Any, param: str) -> ThinkingWish:
    """Read what is for the template itself: a word of its own is its own business."""
    options = fields.record(value, param)
    for name in _NAMES:
        said = options.get(name)
        if type(said) is bool or (type(said) is str and said.lower() in (*_OFF, *_ON)):
            return _word(said, f"{param}.{name}")
    return ThinkingWish()


def _word(value: Any, param: str) -> ThinkingWish:
    """Read true or false, a level, or one of the words for on and off."""
    if type(value) is bool:
        return ThinkingWish(value)
    word = value.lower() if type(value) is str else ""
    if word in _ON:
        return ThinkingWish(True)
    if word in _OFF:
        return ThinkingWish(False)
    if word in THINKING_LEVELS:
        return ThinkingWish(True, word)
    allowed = "true, false, on, off, none or one of " + ", ".join(THINKING_LEVELS)
    fields.refuse(param, value, allowed)


def _level(value: Any, param: str) -> ThinkingWish:
    if value == "":
        return ThinkingWish()
    word = value.lower() if type(value) is str else ""
    if word not in THINKING_LEVELS and word not in _OFF:
        fields.refuse(param, value, "none, " + ", ".join(THINKING_LEVELS))
    return _word(word, param)


def _control(value: Any, param: str) -> ThinkingWish:
    """Read a word, Anthropic's {type, budget_tokens} or {enabled, effort, level, max_tokens}."""
    if type(value) is not dict:
        return _word(value, param)
    return _first(
        [
            reader(value[name], f"{param}.{name}")
            for name, reader in _CONTROLS
            if value.get(name) is not None
        ]
    )


def _kind(value: Any, param: str) -> ThinkingWish:
    if value not in ("enabled", "adaptive", "auto", "between_tools", "disabled"):
        fields.refuse(param, value, "enabled, adaptive, auto, between_tools or disabled")
    return _word(value, param)


def _output_config(value: Any, param: str) -> ThinkingWish:
    """Read Anthropic's effort: it says how hard to work, not whether to think."""
    effort = fields.record(value, param).get("effort")
    level = None if effort is None else _level(effort, f"{param}.effort").level
    return ThinkingWish(None, level)


def _budget(value: Any, param: str) -> ThinkingWish:
    """Read a number of tokens: 0 is none at all, -1 as many as it takes."""
    tokens = fields.integer({param: value}, param, -1, BUDGET_MAX)
    assert tokens is not None, param
    return ThinkingWish(tokens != 0, None, tokens if tokens >= 0 else None)


_Reader = Callable[[Any, str], ThinkingWish]  # (value, its name for errors); raises RequestError
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
