"""A complete answer taken apart: what is reasoning, what is content, what are tool calls.

For the whole text of one turn; streaming stays out, and so does the check of arguments against
their schema. Marks are found in the text, so a mark that the model quotes counts as one.
"""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from worker.stream import harmony

log = logging.getLogger(__name__)

MARKS_MAX: Final = 400  # that are looked at for the end of one call
PYTHON_TAG: Final = "<|python_tag|>"  # Llama 3 may write it in front of a call
_NOT_FUNCTIONS = frozenset({"user", "assistant", "all"})  # whom a harmony message may be for
_JSON = json.JSONDecoder()
# What the formats in XML put around a function and its arguments.
_TAG = r"<(?P<closes>/?)(?P<tag>(?:\w+[:_])?(?:function|invoke|param(?:eter)?|arg_key|arg_value))\b"


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call. Arguments that are no JSON object stay the text that they are."""

    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class Parts:
    """What the model said in one turn."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()


class PartsReader:
    """Takes apart what one model writes, by the marks that mlx-lm finds for its tokenizer.

    Immutable: any thread may use it, also several at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take mlx-lm's TokenizerWrapper."""
        self._has_channels = tokenizer.get_vocab().keys() >= harmony.MARKS
        self._think_start: str = tokenizer.think_start or ""
        self._think_end: str = tokenizer.think_end or ""
        self._call_start: str = tokenizer.tool_call_start or ""
        self._call_end: str = tokenizer.tool_call_end or ""  # "" also where calls have no end mark
        self._parser = tokenizer.tool_parser
        marks = map(re.escape, filter(None, (self._call_start, self._call_end)))
        self._marks = re.compile("|".join((*marks, _TAG)))

    def is_thinking_open(self, prompt_tail: str) -> bool:
        """Tell whether a generation prompt leaves a think block open.

        `prompt_tail` is what the template writes behind the last message, nothing of a message.
        """
        if self._has_channels:
            return prompt_tail.endswith(harmony.ANALYSIS)
        if not self._think_start:
            return False
        return prompt_tail.rfind(self._think_start) > prompt_tail.rfind(self._think_end)

    def read(self, text: str, is_thinking: bool, tools: list[Any]) -> Parts:
        """Return the parts of a complete generated text, without its end-of-turn token.

        `is_thinking`: the prompt left a think block open. `tools` are the request's, in OpenAI's
        shape; they tell the types of arguments that a format writes as plain text.

        Reasoning is the think block that the text begins with: with its opening mark, or without
        it where the prompt or nobody wrote one. A block that never closes is all there is.
        Newlines at both ends of the block, and those behind it, belong to the block.
        A call that does not parse is content, exactly as written, and so is all other text. Blanks
        beside a call are content only between text and text: those in front of the call, or
        where there are none, those behind it.
        """
        if self._has_channels:
            return _of_channels(harmony.ANALYSIS + text if is_thinking else text)
        reasoning, answer = self._split_thinking(text, is_thinking)
        if self._parser is None:
            call = _bare_call(answer, tools)
            return Parts(reasoning, "", (call,)) if call else Parts(reasoning, answer)
        texts, calls = self._split_calls(answer, tools)
        return Parts(reasoning, _content(texts), calls)

    def _split_thinking(self, text: str, is_thinking: bool) -> tuple[str, str]:
        """Return the text of the think block, and what stands behind it."""
        if not self._think_start:
            return "", text
        opened = text.lstrip()
        if opened.startswith(self._think_start):
            block = opened[len(self._think_start) :]
        elif is_thinking or self._closes_unopened(text):
            block = text
        else:
            return "", text
        reasoning, _, answer = block.partition(self._think_end)
        return reasoning.strip("\n"), answer.lstrip("\n")

    def _closes_unopened(self, text: str) -> bool:
        """Tell whether a think block ends in `text` that nobody opened.

        A closing mark behind an opening one or inside a call is a quoted one.
        """
        before, found, _ = text.partition(self._think_end)
        opens = self._think_start in before or (self._call_start and self._call_start in before)
        return bool(found) and not opens

    def _split_calls(self, text: str, tools: list[Any]) -> tuple[list[str], tuple[Call, ...]]:
        """Return the texts before, between and behind the calls, one more than runs of calls."""
        texts: list[str] = []
        calls: list[Call] = []
        shown = at = 0
        while (start := text.find(self._call_start, at)) >= 0:
            at = start + len(self._call_start)
            for end, behind in self._ends(text, at):
                if found := self._parsed(text[at:end], tools):
                    texts.append(text[shown:start])
                    calls += found
                    shown = at = behind
                    break
        return [*texts, text[shown:]], tuple(calls)

    def _ends(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        """Yield where the call that begins at `start` may end, and where the text goes on.

        A JSON value ends by itself, whatever marks its strings quote. In other formats a mark
        inside an argument is a quoted one. A call whose end mark is missing ends where the next
        one begins, or with the text.
        """
        if not self._call_end:
            yield from self._ends_of_json(text, start)
            return
        if (end := _json_end(text, start)) is not None:
            behind = _skip_blank(text, end)
            if text.startswith(self._call_end, behind):
                yield end, behind + len(self._call_end)
            elif behind == len(text) or text.startswith(self._call_start, behind):
                yield end, behind
        depth = 0
        for mark in islice(self._marks.finditer(text, start), MARKS_MAX):
            if mark["tag"]:
                depth += -1 if mark["closes"] else 1
            elif depth <= 0:
                yield mark.start(), mark.start() if mark[0] == self._call_start else mark.end()
                return
        if depth <= 0:
            yield len(text), len(text)
        elif (end := text.find(self._call_end, start)) >= 0:
            yield end, end + len(self._call_end)

    def _ends_of_json(self, text: str, start: int) -> Iterator[tuple[int, int]]:
        """Yield the ends of a call without an end mark: Mistral's `[...]` or `name[ARGS]{...}`."""
        following = text.find(self._call_start, start)
        limit = following if following >= 0 else len(text)
        brace = text.find("{", start, limit)
        ends = (_json_end(text, start), _json_end(text, brace) if brace >= 0 else None, limit)
        yield from ((end, end) for end in ends if end is not None)

    def _parsed(self, text: str, tools: list[Any]) -> list[Call]:
        """Return the calls that mlx-lm's parser finds in `text`, none if it is no call."""
        if not text.strip():
            return []
        try:
            rows = self._parser(text, tools or None)
            return [_call(row) for row in (rows if isinstance(rows, list) else [rows])]
        except Exception as error:  # upstream's parsers raise IndexError, RecursionError and more
            log.debug("tool call does not parse: %s", type(error).__name__)
            return []


def _json_end(text: str, start: int) -> int | None:
    """Return where the JSON object or array ends that `start` leads to, None if none does."""
    start = _skip_blank(text, start)
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        _, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end


def _skip_blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _call(row: Any) -> Call:
    """Return the call in what a parser found. Raises ValueError where it is none."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not row["name"].strip():
        raise ValueError("a call has a name")
    arguments = _arguments(row.get("arguments", row.get("parameters")))
    return Call(row["name"].strip(), arguments)


def _arguments(value: Any) -> dict[str, Any] | str:
    """Return arguments as a JSON object, or as text that is none.

    Raises ValueError, TypeError or RecursionError where they are neither.
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return _object_or_text(value)
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    # Parsers that read Python literals also give tuples, sets and bytes.
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain


def _object_or_text(text: str) -> dict[str, Any] | str:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _content(texts: list[str]) -> str:
    """Join the texts around calls, without the blanks that only set the calls apart."""
    if len(texts) == 1:
        return texts[0]
    content = texts[0] if texts[0].strip() else ""
    for text in texts[1:]:
        if text.strip():
            content += text if content and not content[-1].isspace() else text.lstrip()
    return content if texts[-1].strip() else content.rstrip()


def _bare_call(text: str, tools: list[Any]) -> Call | None:
    """Return the call that the whole text is, as Llama 3 writes it: a JSON object, no marks.

    Only where the request has a tool of that name: any other object is an answer.
    """
    row = _object_or_text(text.strip().removeprefix(PYTHON_TAG))
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        return None
    arguments = row.get("parameters", row.get("arguments"))
    if row["name"] not in _names(tools) or not isinstance(arguments, dict):
        return None
    return Call(row["name"], arguments)


def _names(tools: list[Any]) -> list[Any]:
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return [function.get("name") for function in functions if isinstance(function, dict)]


def _of_channels(text: str) -> Parts:
    """Return the parts of a harmony text; messages of one part stand on lines of their own."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[Call] = []
    for message in harmony.channel_messages(text):
        if name := _function_called(message):
            calls.append(Call(name, _object_or_text(message.text)))
        elif message.channel == "analysis":
            reasoning.append(message.text)
        else:
            content.append(message.text)
    return Parts(_lines(reasoning), _lines(content), tuple(calls))


def _function_called(message: harmony.ChannelMessage) -> str:
    """Return the name of the tool that a message is for, "" if it is for none.

    A function's own namespace tells a call on any channel; another recipient, as a built-in tool
    that nobody offered, tells one on the commentary channel only.
    """
    recipient = message.recipient
    if recipient.startswith("functions."):
        return recipient.removeprefix("functions.")
    is_call = message.channel == "commentary" and recipient not in _NOT_FUNCTIONS
    return recipient if is_call else ""


def _lines(texts: list[str]) -> str:
    return "\n".join(text for text in texts if text)
