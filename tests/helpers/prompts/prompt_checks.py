"""Compares the prompts that Hearth builds with transformers' rendering of the same template."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

from hearth.shared.errors import RequestError
from hearth.shared.settings import load_settings
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.setup.prompt_and_session_setup import end_ids_of, make_builder
from scripts.harness.model_families import ADDED_TOKENS_MAX, trained_tokenizer
from tests.helpers.families.family_cases import WrittenFamily
from tests.helpers.prompts.conversations import (
    CONVERSATIONS,
    DATA,
    DIALECTS,
    IN_DIALECTS,
    Body,
    prompt_of,
)
from tests.helpers.prompts.departures import BREAK, DEPARTURES, Asked, may_change

Found = dict[str, dict[str, str]]  # what a prompt is, by dialect and conversation

EQUAL, REFUSED, NEITHER = "equal", "refused by both", "neither"
CHANGES_MAX: Final = 4  # in one prompt
BOS, EOS = "<s>", "</s>"
# File of a template -> a client's switch, * = any other -> the variables that say it there;
# `_system` is a word for the system's message.
SWITCHES: Final[dict[str, Any]] = json.loads((DATA / "switches.json").read_text())
# What templates name as a token: the added tokens of the tokenizer.
_MARK: Final = re.compile(
    r"<\|[^|<>'\"{}\s]{1,40}\|>|<｜[^｜<>'\"]{1,40}｜>|\[/?[A-Z]{3,}(?:_[A-Z]+)*\]"
    r"|</?(?:think|tool_call|tool_response|tool_calls|tools|arg_key|arg_value|tool_output)>"
    r"|</?(?:start_of_turn|end_of_turn|seed:[a-z_]+)>"
    r"|<(?:tool_call|turn|channel)\|>|<\|(?:tool_call|turn|channel)>|]<\|[^|]+\|>\["
)
_TEXT_MARK: Final = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
# What a template makes of what it does not read: nothing that a model was trained on.
_STRAY: Final = re.compile(r"(?<!: )(?<!=)None|(['\"])type\1: ?\1text\1")
# Tokens of a model that its template does not name.
UNNAMED: Final = {"LFM2.5-Instruct.jinja": ("<|tool_call_start|>", "<|tool_call_end|>")}
_PLAIN: Final = functools.cache(lambda: Tokenizer.from_file(str(trained_tokenizer())))
_compiled: Final = functools.cache(chat_template_utils._compile_jinja_template.__wrapped__)


@dataclass(frozen=True)
class TemplateFamily(WrittenFamily):
    """A tokenizer with the marks of one template."""

    source: str = ""

    @property
    def template(self) -> str:
        return self.source


class PromptChecks:
    """The prompts of one template."""

    def __init__(self, name: str, source: str) -> None:
        found = (BOS, EOS, *UNNAMED.get(name, ()), *_MARK.findall(source))
        marks = [*dict.fromkeys(found)][:ADDED_TOKENS_MAX]
        controls = tuple(mark for mark in marks if not _TEXT_MARK.fullmatch(mark))
        texts = tuple(filter(_TEXT_MARK.fullmatch, marks))
        ends: Any = {"eos": EOS, "answer_end": EOS, "call_end": EOS, "bos": BOS}
        family = TemplateFamily(name, str, controls, texts, (EOS,), **ends, source=source)
        self._tokenizer, settings = family.tokenizer, load_settings({}, None)
        turns, end_ids = turn_marks(self._tokenizer), end_ids_of(self._tokenizer, {})
        self._builder = make_builder(self._tokenizer, turns, end_ids, 100_000, settings)
        self._asked = Asked([], None, {}, source, tuple(marks))
        self._switches = SWITCHES.get(name, {})
        self._known: dict[Any, None] = {}  # departures that have explained a prompt together
        self.shown = functools.cache(self._shown)

    @functools.cached_property
    def found(self) -> Found:
        """Return what each prompt is."""
        chat = {name: self.kind(name) for name in CONVERSATIONS}
        ids = {name: self.ids(prompt_of("chat", CONVERSATIONS[name])) for name in IN_DIALECTS}
        return {"chat": chat} | {
            dialect: {
                name: chat[name]
                if self.ids(prompt_of(dialect, CONVERSATIONS[name])) == ids[name]
                else self.kind(name, dialect)
                for name in IN_DIALECTS
            }
            for dialect in DIALECTS
            if dialect != "chat"
        }

    def kind(self, name: str, dialect: str = "chat") -> str:
        """Return EQUAL, REFUSED, NEITHER, or the names of the departures that explain it."""
        asked = self.asked(CONVERSATIONS[name])
        ids, shown = self.ids(prompt_of(dialect, CONVERSATIONS[name])), self.text(asked)
        if ids is None or self._is(asked, ids):
            return EQUAL if ids else REFUSED if shown is None else NEITHER
        active = [each for each in DEPARTURES if may_change(each, asked)]
        if shown is not None:  # then what shows nothing of itself explains nothing
            active = [
                each
                for each in active
                if each.is_chosen or each.follows or self.text(each.change(asked)) != shown
            ]
        sizes = range(1, CHANGES_MAX + 1)
        groups = itertools.chain.from_iterable(itertools.combinations(active, n) for n in sizes)
        for some in itertools.chain(self._known, groups):
            if self._is(changed(asked, some), ids) and self._is_due(asked, some):
                self._known[some] = None
                return " + ".join(each.name for each in some)
        return NEITHER

    def _is(self, asked: Asked, ids: Sequence[int]) -> bool:
        text = self.text(asked)
        is_text = text is not None and text.replace(BREAK, "") == self._tokenizer.decode(ids)
        return is_text and self.encoded(text or "") == ids

    def _is_due(self, asked: Asked, some: Sequence[Any]) -> bool:
        """Whether without each of the changes less is shown, in another order, or nothing."""
        words = set(re.findall(r"\w{3,}", json.dumps(asked[:2], ensure_ascii=False)))
        said = [m["content"].strip() for m in asked.messages if isinstance(m["content"], str)]

        def worth(*changes: Any) -> int:
            text = self.text(changed(asked, changes))
            if text is None:
                return -1
            end = functools.reduce(lambda at, each: text.find(each, at) if at >= 0 else at, said, 0)
            strays = len(_STRAY.findall(text))
            return 2 * sum(map(text.count, words)) + (end >= 0) - 99 * strays

        others = ((one, [each for each in some if each is not one]) for one in some)
        return all(one.is_chosen or worth(*rest) < worth(*some) for one, rest in others)

    def ids(self, prompt: Any) -> list[int] | None:
        """Return the token ids of what the proxy read; None where Hearth refuses it."""
        told = prompt.template_kwargs
        content = PromptContent(prompt.messages, prompt.tools, told, thinking=prompt.thinking)
        with contextlib.suppress(RequestError):
            return self._builder.build(content).ids
        return None

    def asked(self, body: Body) -> Asked:
        """Return what transformers' users give the template: arguments are objects there."""
        messages = json.loads(json.dumps(body["messages"]))
        for call in [call for each in messages for call in each.get("tool_calls") or ()]:
            with contextlib.suppress(ValueError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        switch = {True: "on", False: "off"}.get(body.get("enable_thinking", ""))
        switch = switch or body.get("reasoning_effort")
        variables = self._switches.get(switch, self._switches.get("*", {})) if switch else {}
        if word := variables.get("_system"):  # it stands in the system's message
            lead = [each["content"] for each in messages[:1] if each["role"] == "system"]
            told = {"role": "system", "content": "\n".join((*lead, word))}
            messages, variables = [told, *messages[len(lead) :]], {}
        return self._asked._replace(
            messages=messages, tools=body.get("tools") or None, variables=variables
        )

    def text(self, asked: Asked) -> str | None:
        """Return what transformers renders; None where the template refuses it."""
        return self.shown(json.dumps(asked[:3]))

    def _shown(self, asked: str) -> str | None:
        messages, tools, variables = json.loads(asked)
        sandbox: Any = {"ImmutableSandboxedEnvironment": ImmutableSandboxedEnvironment}
        named = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, **variables}
        with (
            contextlib.suppress(Exception),  # a template raises whatever it likes
            patch.multiple(chat_template_utils, _compile_jinja_template=_compiled, **sandbox),
        ):
            texts, _ = chat_template_utils.render_jinja_template(
                [messages],
                tools,
                chat_template=self._asked.source,
                add_generation_prompt=True,
                **named,
            )
            return str(texts[0])
        return None

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a rendered text; what was broken is mended, and no token."""
        if BREAK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        marks = sorted(self._asked.marks, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
        runs = (
            [self._tokenizer.convert_tokens_to_ids(piece)]
            if piece in marks
            else _PLAIN().encode(piece.replace(BREAK, "")).ids
            for piece in pieces
        )
        return list(itertools.chain.from_iterable(runs))


def changed(asked: Asked, some: Sequence[Any]) -> Asked:
    return functools.reduce(lambda each, departure: departure.change(each), some, asked)
