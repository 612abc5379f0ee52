"""Compares the prompts that Hearth builds with transformers' rendering of the same template."""

import contextlib
import functools
import itertools
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from jinja2.sandbox import ImmutableSandboxedEnvironment
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer
from transformers.utils import chat_template_utils

from hearth.shared.errors import RequestError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.setup.prompt_and_session_setup import end_ids_of, make_builder
from scripts.fixtures import checkpoint_files
from scripts.harness.model_families import _trained_tokenizer
from tests.helpers.prompts.conversations import (
    CONVERSATIONS,
    DATA,
    DIALECTS,
    IN_DIALECTS,
    Body,
    prompt_of,
)
from tests.helpers.prompts.departures import BREAK, DEPARTURES, Asked, Departure

Found = dict[str, dict[str, str]]  # by dialect and conversation
EQUAL, REFUSED, NEITHER = "equal", "refused by both", "neither"
CHANGES_MAX: Final = 4  # in one prompt
BOS, EOS = "<s>", "</s>"
# File of a template -> a client's switch -> the variables that say the same to this template.
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
_STRAY: Final = re.compile(r"None|(['\"])type\1: ?\1text\1")


class PromptChecks:
    """The prompts of one template, whose marks are tokens of a small tokenizer."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self._source = source
        self._marks = tuple(sorted({BOS, EOS, *_MARK.findall(source)}))
        plain = Tokenizer.from_file(str(_trained_tokenizer()))
        self._plain = Tokenizer.from_str(plain.to_str())
        plain.add_tokens(
            [
                AddedToken(mark, special=not _TEXT_MARK.fullmatch(mark), normalized=False)
                for mark in self._marks
            ]
        )
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            plain.save(str(directory / "tokenizer.json"))
            ends = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS}
            checkpoint_files.write_tokenizer_config(directory, source, ends)
            self._tokenizer = load(directory, eos_token_ids=[plain.token_to_id(EOS)])
        settings = load_settings({}, None)
        turns, end_ids = turn_marks(self._tokenizer), end_ids_of(self._tokenizer, {})
        self._shown: dict[str, str | None] = {}
        self._known: dict[tuple[Departure, ...], None] = {}  # that have explained a prompt
        self._builder = make_builder(self._tokenizer, turns, end_ids, 100_000, settings)

    @cached_property
    def found(self) -> Found:
        """Return what each prompt is, by dialect and conversation."""
        chat = {name: self.kind(name) for name in CONVERSATIONS}
        ids = {name: self.ids(prompt_of("chat", CONVERSATIONS[name])) for name in IN_DIALECTS}
        found = {"chat": chat}
        for dialect in [*DIALECTS][1:]:
            found[dialect] = {
                name: chat[name]
                if self.ids(prompt_of(dialect, CONVERSATIONS[name])) == ids[name]
                else self.kind(name, dialect)
                for name in IN_DIALECTS
            }
        return found

    def kind(self, name: str, dialect: str = "chat") -> str:
        """Return EQUAL, REFUSED, NEITHER, or the names of the departures that explain it."""
        body = CONVERSATIONS[name]
        ids, asked = self.ids(prompt_of(dialect, body)), self._asked(body)
        shown = self.shown(asked)
        if ids is None:
            return REFUSED if shown is None else NEITHER
        text = self._tokenizer.decode(ids)
        if self._is(asked, shown, text, ids):
            return EQUAL
        active = [each for each in DEPARTURES if each.may(asked)]
        if shown is not None:  # then what shows nothing of itself explains nothing
            active = [each for each in active if self.shown(each.change(asked)) != shown]
        sizes = range(1, min(CHANGES_MAX, len(active)) + 1)
        all_of = itertools.chain.from_iterable(itertools.combinations(active, n) for n in sizes)
        for some in itertools.chain(self._known, all_of):
            changed = changed_by(some, asked)
            if self._is(changed, self.shown(changed), text, ids) and self._is_due(asked, some):
                self._known[some] = None
                return " + ".join(each.name for each in some)
        return NEITHER

    def _is(self, asked: Asked, shown: str | None, text: str, ids: Sequence[int]) -> bool:
        return shown is not None and shown.replace(BREAK, "") == text and self.encoded(shown) == ids

    def _is_due(self, asked: Asked, some: Sequence[Departure]) -> bool:
        """Whether without each of the changes less is shown, or nothing at all."""
        whole = self._worth(asked, self.shown(changed_by(some, asked)))
        return all(
            each.is_chosen or self._worth(asked, self.shown(changed_by(others, asked))) < whole
            for each in some
            for others in [[other for other in some if other is not each]]
        )

    def _worth(self, asked: Asked, text: str | None) -> int:
        """Return how much of what was said stands in the text, less what nobody said."""
        if text is None:
            return -1
        words = set(re.findall(r"\w{3,}", json.dumps(asked[:2], ensure_ascii=False)))
        return sum(map(text.count, words)) - 99 * len(_STRAY.findall(text))

    def ids(self, prompt: Any) -> list[int] | None:
        content = PromptContent(prompt.messages, prompt.tools, prompt.template_kwargs)
        try:
            return self._builder.build(content).ids
        except RequestError:
            return None

    def _asked(self, body: Body) -> Asked:
        """Return what transformers' users give the template: arguments are objects there."""
        messages = json.loads(json.dumps(body["messages"]))
        for call in [call for each in messages for call in each.get("tool_calls") or ()]:
            with contextlib.suppress(ValueError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        switch = body.get("reasoning_effort")
        if "enable_thinking" in body:
            switch = "on" if body["enable_thinking"] else "off"
        known = SWITCHES.get(self.name, {})
        variables = known.get(switch, known.get("*", {})) if switch else {}
        return Asked(messages, body.get("tools") or None, variables, self._source, self._marks)

    def shown(self, asked: Asked) -> str | None:
        """Return what transformers renders; None where the template refuses it."""
        key = json.dumps(asked[:3], sort_keys=False)
        if key not in self._shown:
            self._shown[key] = shown_by_transformers(self._source, asked)
        return self._shown[key]

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a rendered text; what was broken is mended, and no token."""
        if BREAK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        ids: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, self._longest_first))})", text):
            if piece in self._marks:
                ids.append(self._tokenizer.convert_tokens_to_ids(piece))
            else:
                ids += self._plain.encode(piece.replace(BREAK, "")).ids
        return ids

    @cached_property
    def _longest_first(self) -> list[str]:
        return sorted(self._marks, key=len, reverse=True)


def changed_by(some: Iterable[Departure], asked: Asked) -> Asked:
    for each in some:
        asked = each.change(asked)
    return asked


def shown_by_transformers(source: str, asked: Asked) -> str | None:
    """Return transformers' rendering, in its own sandbox; None where the template refuses."""
    with patch.multiple(
        chat_template_utils,
        ImmutableSandboxedEnvironment=ImmutableSandboxedEnvironment,
        _compile_jinja_template=_compiled,
    ):
        try:
            texts, _ = chat_template_utils.render_jinja_template(
                [asked.messages],
                tools=asked.tools,
                chat_template=source,
                add_generation_prompt=True,
                **{"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, **asked.variables},
            )
        except Exception:  # a template raises whatever it likes
            return None
    return str(texts[0])


_compiled: Final = functools.cache(chat_template_utils._compile_jinja_template.__wrapped__)
