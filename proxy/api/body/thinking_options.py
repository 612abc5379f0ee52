"""Reads how much the model may think, from the many fields in which clients write it.

The worker translates the wish for the model's chat template. If a body has several such fields,
the first in `_READERS` wins, and a field at the top wins over one in `extra_body` or `metadata`.
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
# Template variables in which `chat_template_kwargs` may carry a wish, but no budget.
_SWITCHES: Final = tuple(name for name, *_ in TEMPLATE_SWITCHES if name != "thinking_budget")
_NAMES: Final = (*_SWITCHES, "reasoning_effort")


def read(body: Body) -> tuple[dict[str, Any], ThinkingWish]:
    """Return the variables that `body` has for the chat template, and its thinking wish.

    Raises:
        RequestError: a field at the top of `body` has a value that no API allows. Nested fields
            belong to no API, so their unknown values are ignored.
    """
    wishes = list(_wishes(body, strict=True))
    template_kwargs = dict(fields.optional_object(body, "chat_template_kwargs"))
    for name in _NESTED:
        nested = body.get(name)
        if type(nested) is dict:
            wishes += _wishes(nested, strict=False)
            options = nested.get("chat_template_kwargs")
            template_kwargs = (options if type(options) is dict else {}) | template_kwargs
    wish = _combined(wishes)
    template_kwargs |= {  # booleans, as a template would take the string "false" for true
        name: wish.on
        for name in _SWITCHES[:2]
        if _options({name: template_kwargs.get(name)}, name).on is not None
    }
    if template_kwargs.get("reasoning_effort") in _OFF:  # a word that templates may not know
        del template_kwargs["reasoning_effort"]
    return template_kwargs, ThinkingWish(False) if wish.on is False else wish


def _combined(wishes: list[ThinkingWish]) -> ThinkingWish:
    """Return one wish; each field comes from the first of `wishes` that has it."""
    return ThinkingWish(
        next((wish.on for wish in wishes if wish.on is not None), None),
        next((wish.level for wish in wishes if wish.level is not None), None),
        next((wish.budget for wish in wishes if wish.budget is not None), None),
    )


def _wishes(body: Body, *, strict: bool) -> Iterator[ThinkingWish]:
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
    """Read the wish in a template's variables; values that only the template knows are ignored."""
    options = fields.json_object(value, param)
    for name in _NAMES:
        setting = options.get(name)
        if type(setting) is bool or (type(setting) is str and setting.lower() in (*_OFF, *_ON)):
            return _word(setting, f"{param}.{name}")
    return ThinkingWish()


def _word(value: Any, param: str) -> ThinkingWish:
    """Read true or false, a level, or a word that means on or off."""
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
    """Read a word, Anthropic's {type, budget_tokens}, or {enabled, effort, level, max_tokens}."""
    if type(value) is not dict:
        return _word(value, param)
    return _combined(
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
    """Read Anthropic's effort, which sets a level and does not turn thinking on."""
    effort = fields.json_object(value, param).get("effort")
    level = None if effort is None else _level(effort, f"{param}.effort").level
    return ThinkingWish(None, level)


def _budget(value: Any, param: str) -> ThinkingWish:
    """Read a number of tokens: 0 turns thinking off, -1 sets no limit."""
    tokens = fields.integer({param: value}, param, -1, BUDGET_MAX)
    assert tokens is not None, param
    return ThinkingWish(tokens != 0, None, tokens if tokens >= 0 else None)


_Reader = Callable[[Any, str], ThinkingWish]  # (value, its path in errors); raises RequestError
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
    ("think", _word),  # Ollama's field
    ("reasoning_effort", _level),
    ("reasoning", _control),
    ("output_config", _output_config),
    ("thinking_budget", _budget),
    ("thinking_token_budget", _budget),
    ("thinking_budget_tokens", _budget),
)
