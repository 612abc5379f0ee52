"""Tells what of a family's answers is read right, in-process: no server, and no weights."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.stream.answer_parts import AnswerParts
from scripts.harness.constrained_answers import constrainer_for, walk
from tests.helpers.families.family_cases import TOOLS, WEATHER, Case, WrittenFamily
from tests.helpers.worker.prompt_builders import builder_of

# Case -> the column of docs/formats.md.
JUDGED: Final = {
    "call": "call",
    "two": "two calls",
    "words_call": "words, call",
    "thinking_call": "thinking, call",
    "thinking_text": "thinking, text",
    "blanks": "blanks",
    "no_arguments": "no arguments",
    "types": "types",
}
COLUMNS: Final = (*JUDGED.values(), "history", "forced", "end", "odd shapes")
RIGHT, WRONG, NONE = "✓", "✘", "–"
QUESTION: Final = "What is the weather?"
FORCED: Final = Constraints(tool_choice="required", tool_names=["get_weather"])


class FamilyChecks:
    """One family's answers behind its own prompts."""

    def __init__(self, family: WrittenFamily) -> None:
        self.family = family
        self.tokenizer = family.tokenizer
        self.builder = builder_of(family, thinking="auto")
        self.format = OutputFormat(self.tokenizer, self.builder.tool_form)
        self.compiler = constrainer_for(family, reader=self.format)

    @cached_property
    def faults(self) -> dict[str, str]:
        """Return what is wrong, by case or column; the right ones have "".

        What a family has none of is left out.
        """
        found = {name: self._tried(self._case, case) for name, case in self.family.cases.items()}
        judged = [case for name, case in self.family.cases.items() if name in JUDGED]
        found["end"] = "; ".join(filter(None, map(self._end, judged)))
        if self.family.history:
            found["history"] = self._tried(self._history)
        if self.family.forced:
            found["forced"] = self._tried(self._forced)
        return {JUDGED.get(name, name): fault for name, fault in found.items()}

    def cells(self) -> list[str]:
        """Return the family's row of the table, in the order of COLUMNS."""
        odd = [fault for name, fault in self.faults.items() if name.startswith("odd-")]
        row = {name: WRONG if fault else RIGHT for name, fault in self.faults.items()}
        if odd:
            row[COLUMNS[-1]] = f"{odd.count('')} of {len(odd)}"
        return [row.get(column, NONE) for column in COLUMNS]

    def _tried(self, check: Callable[..., str], *given: Case) -> str:
        try:
            return check(*given)
        except RequestError as error:  # say, the template refuses the tools
            return str(error)

    # ------------------------------------------------------------ reading

    def _case(self, case: Case) -> str:
        """Return what is wrong with a case read whole, token by token, character by character."""
        tail = self._opening(self.family.think if case.reasoning else None)
        ids = list(
            itertools.takewhile(
                lambda token: token not in self.compiler.end_ids, self._ids(case.text)
            )
        )
        text = self.tokenizer.decode(ids)
        for pieces in ([text], list(self._pieces(ids)), list(text)):
            if fault := self._difference(self._read(tail, pieces), case):
                return f"in {len(pieces)} pieces behind {tail!r}: {fault}"
        return ""

    def _opening(self, think: bool | None) -> str:
        """Return the generation prompt."""
        options = {"enable_thinking": think is not False}
        asked = PromptContent([{"role": "user", "content": QUESTION}], TOOLS, options)
        prompt = self.builder.build(asked)
        return str(self.tokenizer.decode(prompt.ids[prompt.header :]))

    def _read(self, tail: str, pieces: Sequence[str]) -> AnswerParts:
        is_open, may_think = self.format.is_thinking_open(tail), self.format.may_think(tail)
        splitter = self.format.splitter(is_open, TOOLS, may_think=may_think)
        for piece in pieces:
            splitter.feed(piece)
        splitter.finish(is_complete=True)
        return splitter.collector.parts

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _pieces(self, ids: list[int]) -> Iterator[str]:
        """Yield a text token by token; a character of several tokens comes with its last."""
        told = ""
        for end in range(1, len(ids) + 1):
            shown = self.tokenizer.decode(ids[:end])
            if not shown.endswith("\ufffd"):
                yield shown[len(told) :]
                told = shown

    def _difference(self, parts: AnswerParts, case: Case) -> str:
        try:
            got = [(call.name, plain(call.arguments)) for call in parts.calls]
        except ValueError:
            return f"no JSON: {parts.calls}"
        wanted = [(name, plain(arguments)) for name, arguments in case.calls]
        if case.among:
            got = [call for call in got if call in wanted] or (wanted if case.soft else [])
        if got != wanted:
            return f"the calls {got}, not {wanted}; {parts}"
        for said, right in ((parts.content, case.content), (parts.reasoning, case.reasoning)):
            marks = [m for m in (*self.family.controls, *self.family.marks) if m in said]
            if marks if right is None else said.strip() != right.strip():
                return f"{said!r}, not {right!r}"
        return ""

    def _end(self, case: Case) -> str:
        """Return what is wrong with the end: it ends the answer, and no token in front does."""
        ids, end = self._ids(case.text), self.family.end_after(case)
        amid = [self.tokenizer.decode([token]) for token in ids if token in self.compiler.end_ids]
        ends = self.tokenizer.convert_tokens_to_ids(end) in self.compiler.end_ids
        return f"{amid} end it" if amid else "" if ends else f"{end} does not end it"

    # ------------------------------------------------------------ history and forced calls

    def _history(self) -> str:
        function = {"name": "get_weather", "arguments": dict(WEATHER)}
        call = {"id": "call_4f2a9c81d7e3", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."},
        ]
        prompt = self.builder.build(PromptContent(messages, TOOLS, {}))
        _, _, rest = self.tokenizer.decode(prompt.ids).partition(QUESTION)
        shown = rest
        for piece in self.family.history:
            _, found, rest = rest.partition(piece)
            if not found:
                return f"{piece!r} does not follow in {shown!r}"
        return ""

    def _forced(self) -> str:
        """Return what is wrong with all texts of a forced call: one of them has to come through."""
        wanted = Case("", [("get_weather", WEATHER)], reasoning=None)
        faults = []
        for think in (None, False, True):
            tail = self._opening(think)
            for text in self._forced_texts():
                fault = self._refusal(tail, text)
                fault = fault or self._difference(self._read(tail, list(text)), wanted)
                if not fault:
                    return ""
                faults.append(f"{text!r} behind {tail!r}: {fault}")
        return "; ".join(faults)

    def _forced_texts(self) -> Iterator[str]:
        """Yield a call as a client may force it: whole, and without the thinking before it."""
        cases, forced = self.family.cases, self.family.forced
        yield from (cases[name].text for name in ("call", "thinking_call") if name in cases)
        lead, found, call = cases["call"].text.partition(forced)
        for text in (found + call, *self.family.forced_texts):
            yield from (text, lead + text)

    def _refusal(self, tail: str, text: str) -> str:
        try:
            answer = walk(self.compiler, FORCED, TOOLS, tail)
            takes = answer.takes(self._ids(text))
        except (RequestError, AssertionError) as error:  # no grammar, or one that cannot go on
            return str(error)
        return "" if takes else f"refused behind {self.tokenizer.decode(answer.tokens)!r}"


def plain(value: Any) -> str:
    """Return JSON, whether text or read, in one way to write it."""
    read = json.loads(value) if isinstance(value, str) else value
    return json.dumps(read, sort_keys=True, ensure_ascii=False, default=float)
