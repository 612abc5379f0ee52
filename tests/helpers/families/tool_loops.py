"""Leads tool loops through a worker's real prompt side: a family's own words are its answers.

Nothing is computed: the sampled tokens are given, cut naturally or as no tokenizer would cut them.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from hearth.proxy.api.chat_completions import parse
from hearth.proxy.request.message_digests import MessageDigester
from hearth.shared.settings_from_env import load_settings
from hearth.shared.wire_messages import Prompt, Sampling, Speaker, Submit, Usage
from hearth.worker.cache.block_hash import common_length, pack
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.requests.debug_prompt_log import RecentPrompts
from hearth.worker.requests.request_builder import RequestBuilder
from hearth.worker.requests.session_prompt_builder import SessionPromptBuilder
from hearth.worker.schedule.answers.answer_deltas import piece_deltas
from hearth.worker.schedule.request_state import ClientLease, Request
from hearth.worker.schedule.requested_bits import RequestedBits
from hearth.worker.schedule.turn_recorder import TurnRecorder
from hearth.worker.setup import prompt_and_session_setup as setup
from hearth.worker.stream.answer_parts import AnswerParts
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.constrained_answers import end_ids
from scripts.harness.store_builders import ROOT
from scripts.nightly.sources import FetchError
from tests.helpers.families.family_cases import DATA, TOOLS, Case, WrittenFamily
from tests.helpers.families.real_tokenizers import real_family

CHUNK: Final = 256
SHOWN: Final = 16  # tokens
CONTEXT_TOKENS: Final = 200_000
CUTS: Final = ("naturally", "by letters", "by bytes")
CITIES: Final = ("Bodø", "Oslo 日本", "Zu\u0308rich", "a 👩‍💻 b", "x  y", "Łódź\u00a0é")
QUESTION: Final = {"role": "user", "content": "What is the weather in all of them?"}
LATER: Final = {"role": "user", "content": "And the next ones?\n"}
PLAIN_TEXT: Final = Case("It is sunny, 日本.")
# Family -> what its makers' template itself changes in old messages once a question is added.
CHANGES: Final[dict[str, str]] = json.loads((DATA / "template_changes.json").read_text())
# Ids that models write themselves: Mistral's nine letters, and Kimi's, counted over all calls.
WRITTEN_IDS: Final = re.compile(r"a1B2c3D4e|f5G6h7J8k|functions\.get_weather:\d+")


class PromptSide:
    """What a worker knows of one family's model, and its sessions share."""

    def __init__(self, family: WrittenFamily) -> None:
        self.family = family
        self.tokenizer = tokenizer = family.tokenizer
        marks, self.ends = turn_marks(tokenizer), end_ids(tokenizer)
        self.settings = load_settings(
            {"LOG_ROOT": "/none", "ENABLE_REQUEST_LOGGING": "false"}, None
        )
        self.builder = setup.make_builder(
            tokenizer, marks, self.ends, CONTEXT_TOKENS, self.settings
        )
        generation = {"eos_token_id": list(tokenizer.eos_token_ids)}
        size = len(tokenizer.get_vocab())
        model = SimpleNamespace(context_tokens=CONTEXT_TOKENS, vocab_size=size, name="")
        loaded: Any = SimpleNamespace(
            facts=model, tokenizer=tokenizer, generation_config=generation
        )
        self.vocabulary = Vocabulary(tokenizer)
        rule = CutRule(CHUNK, marks)
        self.facts = setup.prompt_facts(
            loaded, ROOT, self.builder, self.vocabulary, rule, RequestedBits()
        )

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """Return the tokens that are no added ones by their bytes."""
        added = self.tokenizer.added_tokens_decoder
        ids = [token for token in self.tokenizer.get_vocab().values() if token not in added]
        return {self.vocabulary.token_bytes(token): token for token in ids}

    def text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text

    def ids_of(self, text: str, cut: str) -> list[int]:
        """Return the tokens of a text, cut as `cut` says, up to one that ends a turn."""
        found = self._natural(text) if cut == CUTS[0] else [*self._cut(text, cut)]
        ends = [at for at, token in enumerate(found) if token in self.ends]
        return found[: ends[0]] if ends else found

    def _natural(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _cut(self, text: str, cut: str) -> Iterator[int]:
        """Yield the tokens of each letter, or byte; the family's marks stay whole."""
        marks = [*self.family.controls, *self.family.marks]
        for part in re.split(f"({'|'.join(map(re.escape, marks))})", text):
            if part in marks:
                yield from self._natural(part)
                continue
            for letter in part:
                told = letter.encode()
                whole = self.ids_by_bytes.get(told) if cut == "by letters" else None
                bytewise = (self.ids_by_bytes[bytes([byte])] for byte in told)
                yield from [whole] if whole is not None else bytewise


@lru_cache(maxsize=1)  # a large vocabulary takes much memory
def real_side(name: str) -> PromptSide:
    """Return the prompt side of a family on its makers' tokenizer.

    A test that needs what the package indexes have not is skipped.
    """
    try:
        return PromptSide(real_family(name))
    except FetchError as error:
        pytest.skip(f"the package index has not what it needs: {error}")


class ToolLoop:
    """One conversation of a client with a family's model.

    `read` has for each request how many tokens were new to a cache that keeps all, `lost` how many
    of those that were fed before stand no more where they stood, `told` what the server says of it.
    """

    def __init__(self, side: PromptSide, cut: str = CUTS[0], directory: Path | None = None) -> None:
        """`directory` is where the sessions are remembered; None = in memory alone."""
        self.side, self.family, self.cut = side, side.family, cut
        self.sessions = setup.make_sessions(side.settings, CHUNK, directory=directory)
        prompts = SessionPromptBuilder(side.builder, self.sessions, side.facts)
        self.builder = RequestBuilder(prompts, RecentPrompts(False), side.facts, 1_000)
        self.recorder = TurnRecorder(self.sessions, lambda: 0, lambda _: None)
        self.messages: list[dict[str, Any]] = [QUESTION]
        self.fed: list[int] = []
        self.read: list[int] = []
        self.lost: list[int] = []
        self.told: list[dict[str, Any] | None] = []
        self.requests: list[Request] = []
        self.asked: list[dict[str, Any]] = []  # the last message of each
        self.written_ids: list[str] = []

    # ------------------------------------------------------------ what the client does

    def lead(self, keeps: bool = True) -> None:
        """Lead six turns of calls, an answer, another question, and two more turns of calls.

        The client `keeps` the thinking and writes arguments as they were, or else leaves it out and
        writes their JSON in another way.
        """
        cases = self.family.cases
        called = [cases[n] for n in ("call", "words_call", "thinking_call") if n in cases]
        for turn in range(6):
            self.take(called[turn % len(called)], keeps)
        self.take(cases.get("thinking_text", PLAIN_TEXT), keeps)
        self.messages.append(LATER)
        for case in called[:2]:
            self.take(case, keeps)
        self.ask()

    def lead_pairs(self, keeps: bool = True) -> None:
        """Lead twelve turns of two calls each, where the family's answers have several."""
        case = self.family.cases.get("two", self.family.cases["call"])
        for _ in range(12):
            self.take(case, keeps)
        self.ask()

    def take(self, case: Case, keeps: bool = True) -> AnswerParts:
        """Ask, have `case` answered with other arguments, and take the results, if any."""
        text, cities = self._text(case)
        request = self.ask()
        parts = self.answer(request, text)
        values = [call.arguments for call in parts.calls if isinstance(call.arguments, dict)]
        assert len(values) == len(case.calls), (text, parts)
        assert all(_composed(row["city"]) in _composed(text) for row in values), (text, parts)
        self.messages.append(self.echo(parts, request.call_ids, keeps))
        for call_id, city in zip(request.call_ids, cities, strict=False):
            result = {"role": "tool", "tool_call_id": call_id, "content": f"Sunny in {city}.\n"}
            self.messages.append(result)
        return parts

    def echo(self, parts: AnswerParts, ids: Sequence[str], keeps: bool) -> dict[str, Any]:
        """Return the answer as a client sends it back."""
        form: dict[str, Any] = {"ensure_ascii": False} if keeps else {"separators": (",", ":")}
        message: dict[str, Any] = {"role": "assistant", "content": parts.content or None}
        if keeps and parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            texts = [json.dumps(call.arguments, **form) for call in parts.calls]
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": call.name, "arguments": text}}
                for id, call, text in zip(ids, parts.calls, texts, strict=True)
            ]
        return message

    def body(self) -> dict[str, Any]:
        think = self.family.think
        options = {} if think is None else {"chat_template_kwargs": {"enable_thinking": think}}
        return {"model": "m", "messages": self.messages, "tools": TOOLS, **options}

    # ------------------------------------------------------------ what is wrong

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the prompts, the last of which nobody has answered."""
        changes = self.family.name in CHANGES and LATER in self.messages
        for at, (request, lost) in enumerate(zip(self.requests, self.lost, strict=True)):
            is_later = self.asked[at] == LATER and changes
            if is_later != bool(lost):
                yield f"{lost} of prompt {at} lost: {self._shown(at)}"
            cause = self.told[at] and self.told[at]["cause"]
            if cause != ("template" if is_later else None):
                yield f"prompt {at} tells {cause}"
            assert request.visit is not None
            if request.visit.doubtful:
                yield f"{request.visit.doubtful} turns of prompt {at} are doubtful"
        shown = self.side.text(self.requests[-1].ids)
        for written in self.written_ids:
            if (times := len(re.findall(rf"(?<!\w){re.escape(written)}(?!\w)", shown))) != 2:
                yield f"{written} stands {times} times, not in its call and its result"

    def _shown(self, at: int) -> str:
        """Return the place where prompt `at` leaves what was fed before it."""
        before, now = self.requests[at - 1], self.requests[at].ids
        fed = [*before.ids, *before.sampled]
        place = max(0, len(fed) - self.lost[at] - SHOWN // 2)
        was, now = fed[place:][:SHOWN], now[place:][:SHOWN]
        return f"{self.side.text(was)!r} became {self.side.text(now)!r}"

    # ------------------------------------------------------------ what the server does

    def ask(self) -> Request:
        """Return the request as the worker makes it; note what of it is new."""
        prompt: Prompt = parse(self.body()).prompt
        names, delta = MessageDigester(True, False).names(prompt.messages)
        prompt = replace(prompt, names=names, delta_chars=delta, speaker=Speaker("key", "s1"))
        lease = ClientLease(f"q{len(self.read)}", b"peer")
        request = self.builder.build(lease, Submit(lease.request_id, prompt, Sampling()))
        kept = common_length(pack(request.ids), pack(self.fed))
        self.read.append(len(request.ids) - kept)
        self.lost.append(len(self.fed) - kept)
        self.requests.append(request)
        self.asked.append(self.messages[-1])
        self.told.append(None)
        return request

    def answer(self, request: Request, text: str) -> AnswerParts:
        """Have `text` sampled behind a request, and record it; return it as it was read."""
        sampled = self.side.ids_of(text, self.cut)
        for token in sampled:
            [*piece_deltas(request, request.output.add(token, None))]
        [*piece_deltas(request, request.output.finish(is_complete=True))]
        request.sampled = sampled
        self.fed = [*request.ids, *sampled]
        length, read = len(request.ids), self.read[-1]
        usage = Usage(length, length - read, read, len(sampled))
        self.told[-1] = self.recorder.ended(request, usage, "stop", None).divergence
        return request.output.parts

    # ------------------------------------------------------------ texts

    def _text(self, case: Case) -> tuple[str, list[str]]:
        """Return a case's text with cities, and ids, that no other turn has."""
        at = len(self.read)
        first, second = (f"{CITIES[(2 * at + n) % len(CITIES)]} {2 * at + n}" for n in (0, 1))
        text = case.text.replace("Oslo", first).replace("Bergen", second).replace("Rome", second)
        return WRITTEN_IDS.sub(self._next_id, text), [first, second][: len(case.calls)]

    def _next_id(self, found: re.Match[str]) -> str:
        number = len(self.written_ids)
        kimi, colon, _ = found[0].partition(":")
        written = f"{kimi}{colon}{number}" if colon else f"abcd{number:05d}"
        self.written_ids.append(written)
        return written


def _composed(text: str) -> str:
    """Return a text as a tokenizer may take it: Qwen's compose letters."""
    return unicodedata.normalize("NFC", text)
