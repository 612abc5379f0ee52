"""Leads tool loops through a worker's real prompt side: a family's own words are its answers.

Nothing is computed: the sampled tokens are given, cut naturally or as no tokenizer would cut them.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.proxy.api.chat_completions.parse import parse
from hearth.shared.our_ids import new_id
from hearth.shared.wire_messages import Speaker, Usage
from hearth.worker.cache.block_hash import common_length, pack
from hearth.worker.schedule.request_ending import TurnRecorder
from hearth.worker.schedule.request_state import Request
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.agent_worker import Desk
from scripts.harness.zero_model import zero_model
from scripts.nightly.sources import FetchError
from tests.helpers.families.family_cases import DATA, TOOLS, Case, WrittenFamily, written_family
from tests.helpers.families.real_tokenizers import real_family

CUTS: Final = ("naturally", "by letters", "by bytes")
CITIES: Final = ("Bodø", "Oslo 日本", "Zu\u0308rich", "a 👩‍💻 b", "x  y", "Łódź\u00a0é")
QUESTION: Final = {"role": "user", "content": "What is the weather in all of them?"}
LATER: Final = {"role": "user", "content": "And the next ones?\n"}
SPOKEN: Final = Case("It is sunny.", content="It is sunny.")
# Ids that models write themselves: Mistral's nine letters, Solar's, Kimi's counted over all calls.
WRITTEN_IDS: Final = re.compile(
    r"a1B2c3D4e|f5G6h7J8k|(?<=<\|tool_call:begin\|>)\w+|(functions\.get_weather:)\d+"
)
# Family -> what its makers' template itself changes in old messages: the cause that is told, and
# whether that is with each step, or once a question is added.
CHANGES: Final[dict[str, Any]] = json.loads((DATA / "template_changes.json").read_text())


class LoopDesk(Desk):
    """A worker without a model. Its loops share what takes long to make, and no conversation."""

    family: WrittenFamily

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The tokens by their bytes, but for the added ones."""
        added = self.family.tokenizer.added_tokens_decoder
        ids = set(self.family.tokenizer.get_vocab().values()) - added.keys()
        return {self.facts.vocabulary.token_bytes(token): token for token in ids}

    def tokens(self, text: str, cut: str) -> Iterator[int]:
        """Yield a text's tokens; the family's marks stay whole however it is cut."""
        family, by_bytes = self.family, self.ids_by_bytes
        marks = "|".join(map(re.escape, (*family.controls, *family.marks)))
        for part in [text] if cut == CUTS[0] else re.split(f"({marks})", text):
            if cut == CUTS[0] or re.fullmatch(marks, part):
                yield from family.tokenizer.encode(part, add_special_tokens=False)
                continue
            for told in map(str.encode, part):
                is_whole = cut == CUTS[1] and told in by_bytes
                yield from (
                    by_bytes[each]
                    for each in ([told] if is_whole else map(bytes, zip(told, strict=True)))
                )


@lru_cache(maxsize=1)  # a large vocabulary takes much memory
def desk_of(name: str, is_real: bool = False) -> LoopDesk:
    """Return the desk of a family, on a small tokenizer of ours or its makers'.

    The test is skipped where the package indexes have not what it needs.
    """
    try:
        family = real_family(name) if is_real else written_family(name)
        desk = LoopDesk("qwen3", family, Path("/none"), model=zero_model("dense"))
    except (FetchError, OSError) as error:
        pytest.skip(f"the package indexes have not what it needs: {error}")
    desk.sessions.new_id = new_id  # not a test's
    return desk


class ToolLoop:
    """One conversation of a client with a family's model; `wrong` is what is wrong with it."""

    numbers = iter(range(1_000_000))

    def __init__(self, desk: LoopDesk, cut: str = CUTS[0]) -> None:
        self.desk, self.cut, self.cases = desk, cut, desk.family.cases
        self.speaker = Speaker(f"key {next(self.numbers)}", "s1")
        self.messages: list[dict[str, Any]] = [QUESTION]
        self.fed: list[int] = []
        self.wrong: list[str] = []
        self.written_ids: list[str] = []
        self.asked = 0

    # ------------------------------------------------------------ what the client does

    def lead(self, keeps: bool = True) -> None:
        """Lead six turns of calls, an answer, another question, and two more turns of calls.

        The client `keeps` the thinking and writes arguments as they were, or else leaves it out and
        writes their JSON in another way.
        """
        names = ("call", "words_call", "thinking_call")
        called = [self.cases[name] for name in names if name in self.cases]
        for turn in range(6):
            self.take(called[turn % len(called)], keeps)
        self.take(self.cases.get("thinking_text", SPOKEN), keeps)
        self.messages.append(LATER)
        for case in called[:2]:
            self.take(case, keeps)
        self.end()

    def lead_pairs(self, keeps: bool = True) -> None:
        """Lead twelve turns of two calls each, where the family's answers have several."""
        for _ in range(12):
            self.take(self.cases.get("two", self.cases["call"]), keeps)
        self.end()

    def take(self, case: Case, keeps: bool = True) -> None:
        """Ask, have `case` answered with cities of its own, and take the results, if any."""
        first, second = (f"{CITIES[number % 6]} {number}" for number in (self.asked, -self.asked))
        text = case.text.replace("Oslo", first).replace("Bergen", second).replace("Rome", second)
        request = self.ask()
        parts = self.answer(request, WRITTEN_IDS.sub(self._next_id, text))
        cities = [call.arguments["city"] for call in parts.calls]  # type: ignore[index]
        assert len(cities) == len(case.calls) and all(map(_in(text), cities)), (text, parts)
        self.messages.append(echo(parts, request.deltas.call_ids, keeps))
        self.messages += [
            {"role": "tool", "tool_call_id": call_id, "content": f"Sunny in {city}.\n"}
            for call_id, city in zip(request.deltas.call_ids, cities, strict=True)
        ]

    def _next_id(self, found: re.Match[str]) -> str:
        number = len(self.written_ids)
        self.written_ids.append(f"{found[1]}{number}" if found[1] else f"abcd{number:05d}")
        return self.written_ids[-1]

    # ------------------------------------------------------------ what the server does

    def ask(self) -> Request:
        """Return the request as the worker makes it; note where it is not what was fed before."""
        think = self.desk.family.think
        wish = "thinking_text" in self.cases if think is None else think
        told = {"chat_template_kwargs": {"enable_thinking": wish}}
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, **told}
        request = self.desk.request(self.desk.named(parse(body).prompt, self.speaker))
        kept = common_length(pack(request.ids), pack(self.fed))
        _, cause, each_step = CHANGES.get(self.desk.family.name) or ("", None, False)
        changes = bool(cause) and not each_step and self.messages[-1] is LATER
        if not each_step and changes != (kept < len(self.fed)):
            was, now = (
                self.desk.prompts.text(ids[max(0, kept - 8) :][:16])
                for ids in (self.fed, request.ids)
            )
            lost = len(self.fed) - kept
            self.wrong.append(f"{lost} tokens of {self.asked}: {was!r} became {now!r}")
        assert request.session_context is not None
        if request.session_context.doubtful and not each_step:
            self.wrong.append(
                f"{request.session_context.doubtful} turns of {self.asked} are doubtful"
            )
        loss = request.session_context.divergence
        told_cause = loss.cause.name if loss else None
        if told_cause != (cause if changes or (each_step and loss) else None):
            self.wrong.append(f"{self.asked} tells {loss}")
        self.asked += 1
        return request

    def answer(self, request: Request, text: str) -> AnswerParts:
        """Have `text` sampled behind a request, and record it; return it as it was read."""
        for token in self.desk.tokens(text, self.cut):
            if token in self.desk.facts.grammar_compiler.end_ids:
                break
            request.sampled.append(token)
            [*request.deltas.of(request.output.add(token, None))]
        [*request.deltas.of(request.output.finish(is_complete=True))]
        self.fed = [*request.ids, *request.sampled]
        usage = Usage(len(request.ids), len(request.ids), 0, len(request.sampled))
        recorder = TurnRecorder(self.desk.sessions, lambda: 0, lambda _: None)
        recorder.ended(request, usage, "stop", None)
        return request.output.parts

    def end(self) -> None:
        """Look at the prompt that nobody answers: each written id has a call and a result."""
        shown = self.desk.prompts.text(self.ask().ids)
        for written in self.written_ids:
            if (times := len(re.findall(rf"(?<!\w){written}(?!\w)", shown))) != 2:
                self.wrong.append(f"{written} stands {times} times, not in its call and its result")


def echo(parts: AnswerParts, ids: Sequence[str], keeps: bool) -> dict[str, Any]:
    """Return an answer as a client sends it back."""
    form: dict[str, Any] = {"ensure_ascii": False} if keeps else {"separators": (",", ":")}
    message: dict[str, Any] = {"role": "assistant", "content": parts.content or None}
    if keeps and parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    functions = [
        {"name": call.name, "arguments": json.dumps(call.arguments, **form)} for call in parts.calls
    ]
    calls = [
        {"id": call_id, "type": "function", "function": function}
        for call_id, function in zip(ids, functions, strict=True)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _in(text: str) -> Any:
    """Return whether a value stands in `text`, which Qwen's tokenizers compose."""
    return lambda value: unicodedata.normalize("NFC", value) in unicodedata.normalize("NFC", text)
