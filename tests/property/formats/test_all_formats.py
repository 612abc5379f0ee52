"""Every format: what its grammar allows is read, shown in history, and read again as the same.

A new file of worker/formats is tested here without a line for it.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest
from hypothesis import assume, given, strategies as st
from llguidance import LLMatcher, LLTokenizer

from hearth.shared.errors import RequestError
from hearth.worker.constraint.call_grammars import (
    NEWLINE,
    NOTHING,
    BareKeys,
    CallGrammar,
    Expression,
    Lark,
)
from hearth.worker.constraint.json_schemas import ToolSchema, tool_of
from hearth.worker.formats.shared import output_format
from hearth.worker.formats.shared.format_parts import ModelFormat, ModelWords, all_formats
from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.prompt_with_sampled_turns import PromptBuilder, PromptContent
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.constrained_answers import tool
from scripts.harness.model_families import FAMILIES, Family
from scripts.harness.slow_properties import slow
from tests.helpers.families.family_cases import family_names, written_family
from tests.helpers.worker.output_formats import StandIn, marks_of, read_whole, streamed
from tests.helpers.worker.prompt_builders import builder_of

BYTES = LLTokenizer("byte")
END = BYTES.eos_token
QUESTION = {"role": "user", "content": "Why?"}


# A form of which each model has its own marks is that of these models.
OF_WORDS = [written_family(name) for name in ("hy3", "hy4")]


def formats() -> Iterator[tuple[str, ModelFormat]]:
    """Yield all formats by the names of their modules, and the numbers where one has several."""
    seen: Counter[str] = Counter()
    for each in all_formats():
        name = each.matches.__module__.rpartition(".")[2]
        if each.for_model:
            for own in OF_WORDS:
                yield own.name, each.for_model(ModelWords({*own.marks, *own.controls}, ""))
        else:
            yield f"{name}-{seen[name]}", each
            seen[name] += 1


TESTED = dict(formats())
# Format -> why its calls cannot be forced. It may only shrink.
WITHOUT_GRAMMAR: dict[str, str] = {}
WRITABLE = [name for name, each in TESTED.items() if each.grammar or each.messages]
# Those whose history the makers' templates alone show, which are not in the tree. They may only
# become fewer.
WITHOUT_HISTORY = {
    *(f"deepseek_dsml-{number}" for number in (0, *range(2, 8))),
    *("functionary-0", "functionary-1", "json_list-6", "json_list-7", "json_list-11"),
    *("minimax-0", "minimax-1", "mistral-0", "mistral-1", "mistral-2", "gemma-0", "hy3"),
    *("kimi_k3-0", "minicpm5-0", "muse-0", "qwen_xml-2", "solar-0"),
}


@cache
def reader_of(each: ModelFormat) -> OutputFormat:
    """Return the reader of a model that has this format, whatever tells so."""
    with patch.object(output_format, "format_of", lambda words: each):
        return OutputFormat(StandIn(each.thinking))


# ---------------------------------------------------------------- what a grammar lets through


def source_of(each: ModelFormat, tools: Sequence[ToolSchema], is_parallel: bool = True) -> str:
    lark = Lark({})
    if each.messages:
        return lark.source(each.messages.call_message(lark, tools, is_parallel))
    assert each.grammar
    return lark.source(each.grammar.expression(lark, tools, is_parallel))


def takes(source: str, text: str) -> bool:
    matcher, tokens = LLMatcher(BYTES, source, log_level=0), list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def rolled(source: str, dice: random.Random, bytes_max: int = 20_000) -> str:
    """Return a text that the grammar lets through; "" where it did not end."""
    matcher, text = LLMatcher(BYTES, source, log_level=0), bytearray()
    for _ in range(bytes_max):
        if matcher.is_accepting() and dice.random() < 0.7:
            return text.decode()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            return text.decode()
        text.append(dice.choice(allowed))
        matcher.consume_token(text[-1])
    return ""


# Stands for what cannot be written: a text with a character that its place has no room for.
UNWRITABLE = Expression("unwritable")


class Written(Lark):
    """Writes calls with given arguments where `Lark` writes what lets them through.

    An expression is the text itself, as JSON. A value's schema has the value: `default`, and of a
    text, which has its own number as its limit, `texts`.
    """

    def __init__(self, draw: Any, gap: str = "") -> None:
        """`gap` stands between a text and its end."""
        super().__init__({})
        self.texts: dict[int, str] = {}
        self._draw = draw
        self._gap = gap

    def text(self, part: str) -> str:
        """Return what an expression, or a literal text, stands for."""
        if not isinstance(part, Expression):
            return part
        if part == NEWLINE:
            return str(self._draw(st.sampled_from(["\n", ""])))
        if part.startswith("/"):
            return str(self._draw(st.from_regex(part.strip("/"), fullmatch=True)))
        return str(json.loads(part))

    def concat(self, *parts: str) -> Expression:
        if UNWRITABLE in parts:
            return UNWRITABLE
        return Expression(json.dumps("".join(map(self.text, parts))))

    def any_of(self, choices: Iterable[str]) -> Expression:
        return self.concat(self._draw(st.sampled_from([*filter(UNWRITABLE.__ne__, choices)])))

    def optional(self, *parts: str) -> Expression:
        return self.concat(*parts)

    def repeated(self, *parts: str) -> Expression:
        # One item of a list has no others behind it, and no separator in front.
        return self.concat(*parts) if len(parts) == 1 else NOTHING

    def rule(self, body: str, options: str = "") -> Expression:
        return self.concat(Expression(body))

    def text_until(self, end: str, characters_max: int | None = None, but: str = "") -> Expression:
        text = self.texts.get(characters_max or 0)
        if text is None:  # an id, which may be any text
            free = st.characters(exclude_categories=["Cs"], exclude_characters=but)
            text = self._draw(st.text(free, max_size=characters_max))
        return UNWRITABLE if {*but} & {*text} else self.concat(text, self._gap, end)

    def json(self, schema: Mapping[str, Any], **options: Any) -> Expression:
        if "default" not in schema:
            return self.concat(
                f'"{self._draw(st.from_regex(schema["pattern"][1:-1], fullmatch=True))}"'
            )
        # llguidance takes no DEL as it is.
        return self.concat(
            json.dumps(schema["default"], ensure_ascii=False).replace("\x7f", "\\u007f")
        )

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> Expression:
        return self.concat(separator.join(self.text(item) for item, _ in items))

    def schema(self, value: Any) -> dict[str, Any]:
        """Return the schema of which `value` is the one that is written."""
        found = {"type": _type(value), "default": value}
        if isinstance(value, str):
            self.texts[found.setdefault("maxLength", 99 + len(self.texts))] = value
        elif isinstance(value, dict):
            found["properties"] = {key: self.schema(each) for key, each in value.items()}
            found |= {"required": [*value], "additionalProperties": False}
        elif isinstance(value, list) and len(value) == 1:
            found["items"] = self.schema(value[0])
        return found


def _type(value: Any) -> str:
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
    return kinds.get(type(value)) or ("array" if isinstance(value, list) else "object")


# ---------------------------------------------------------------- calls

KEYS = st.sampled_from(["path", "old_string", "n", "größe"])
NAMES = st.lists(st.sampled_from(["f", "read_file", "Edit-2", "mcp__x__y"]), unique=True)
WORDS = st.text(
    st.sampled_from("abz 019 .,:;'/{}()&%$#@!?*_-`~^ \n")
    | st.characters(min_codepoint=0xA1, exclude_categories=["Cs"])
).map(str.strip)
ODD = [
    *('"', "'", "\n", "\n\n", "<", ">", "&", "&quot;", "\\", "\\n", " ", "  ", "\t", "ü", "😀"),
    *("null", "true", "7", "1.5", "{}", "[1]", "</", "`", "def f():\n    return x\n", "<![CDATA["),
]


@st.composite
def texts(draw: Any, each: ModelFormat) -> str:
    """Return a text in which beginnings of the format's marks stand, and no whole mark."""
    marks = sorted(marks_of(each))
    begun = [mark[:end] for mark in marks for end in range(1, len(mark))]
    pieces = st.sampled_from([*ODD, *begun]) | st.text(max_size=5)
    text = "".join(draw(st.lists(pieces, max_size=6))).encode(errors="ignore").decode()[:90]
    assume(not any(mark in text for mark in marks))
    return text


@st.composite
def values(draw: Any, each: ModelFormat) -> Any:
    scalars = (
        texts(each)
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.booleans()
        | st.none()
    )
    nested = st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=5,
    )
    return draw(texts(each) | scalars | nested)


def writable(each: ModelFormat, value: Any) -> Any:
    """Return as much of a value as Gemma's grammars, which know it piece by piece, can write."""
    kind = each.grammar.call if each.grammar else None
    if not isinstance(kind, BareKeys):
        return value
    if isinstance(value, str) and not kind.nests:
        return value.replace("}", "")
    if isinstance(value, list):
        return [writable(each, part) for part in [*value, 0][:1]] if kind.nests else 0
    if isinstance(value, dict):
        return {key: writable(each, part) for key, part in value.items()} if kind.nests else 0
    return value


@st.composite
def calls_of(draw: Any, each: ModelFormat) -> list[ToolCall]:
    names = draw(NAMES.map(lambda names: names or ["f"]))
    count = 1 if each.read or (each.grammar and each.grammar.is_single) else 2
    arguments = st.dictionaries(KEYS, values(each).map(lambda it: writable(each, it)), max_size=3)
    return [ToolCall(name, draw(arguments)) for name in names[:count]]


def all_of(
    grammar: CallGrammar, lark: Written, tools: Sequence[ToolSchema], is_parallel: bool
) -> Expression:
    """Return calls of all the tools, in their order, in the place of `CallGrammar.expression`."""
    calls = [lark.text(grammar.call(lark, tool)) for tool in tools]
    return lark.concat(grammar.start, lark.text(grammar.between).join(calls), grammar.end)


def written(each: ModelFormat, lark: Written, tools: list[ToolSchema]) -> str:
    """Return calls of all the tools, in their order."""
    with patch.object(CallGrammar, "expression", all_of):
        if each.messages:
            return lark.text(each.messages.call_message(lark, tools, True))
        assert each.grammar
        return lark.text(each.grammar.expression(lark, tools, True))


# ---------------------------------------------------------------- history


@dataclass(frozen=True, eq=False)
class Shown:
    """A family whose prompts show what was answered."""

    own: Family

    @cached_property
    def builder(self) -> PromptBuilder:
        return builder_of(self.own, thinking="auto")

    @cached_property
    def reader(self) -> OutputFormat:
        return OutputFormat(self.own.tokenizer, self.builder.tool_form)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.own.tokenizer)

    @cached_property
    def words(self) -> tuple[bool, bool]:
        """Return whether reasoning and content beside a call are shown."""
        try:
            _, text = self.text(AnswerParts("zwhy", "zsay", (ToolCall("f", {}),)), [])
        except RequestError:  # not both
            return True, False
        return "zwhy" in text, "zsay" in text

    def text(self, parts: AnswerParts, tools: list[Any]) -> tuple[bool, str]:
        """Return whether the prompt has begun thinking, and how an answer is shown behind that."""
        message = self.own.message(parts)
        results = [
            {"role": "tool", "content": "42", "tool_call_id": call["id"]}
            for call in message["tool_calls"]
        ]
        opening = self._behind([QUESTION], tools)
        text = self._behind([QUESTION, message, *results], tools)
        if not text.startswith(opening):
            opening = opening[: opening.rindex(self.reader.think_marks[0])].rstrip()
        assert text.startswith(opening), text
        # GigaChat's turns end with a mark of their own in a prompt.
        ends = "|".join(map(re.escape, [*self.own.ends, "<|message_sep|>"]))
        answer, *_ = re.split(ends, text[len(opening) :])
        return self.reader.is_thinking_open(opening), answer.strip()

    def _behind(self, messages: list[Any], tools: list[Any]) -> str:
        """Return the prompt behind the question, with each mark as the token that it is."""
        asked = self.builder.build(PromptContent([QUESTION], tools))
        ids = self.builder.build(PromptContent(messages, tools)).ids[asked.header :]
        return "".join(map(self.vocabulary.detokeniser().add, ids))


@cache
def showing() -> dict[str, list[Shown]]:
    """Return by format the families that have it."""
    found: dict[str, list[Shown]] = {name: [] for name in TESTED}
    for own in (*FAMILIES.values(), *map(written_family, family_names(is_real=False))):
        family = Shown(own)
        form = family.reader.model_format
        name = next((name for name, each in TESTED.items() if each is form), own.name)
        if name in TESTED:
            found[name].append(family)
    return found


def told(parts: AnswerParts) -> str:
    """Return the parts in one way to write them: FunctionGemma's template sorts the arguments."""
    return json.dumps(asdict(parts), sort_keys=True)


def same(parts: AnswerParts, calls: Sequence[ToolCall]) -> bool:
    """Return whether the calls are all that was read; true is not 1."""
    return not parts.content and repr(parts.calls) == repr(tuple(calls))


def test_all_formats_but_those_of_the_table_have_a_grammar() -> None:
    assert {*TESTED} - {*WRITABLE} == {*WITHOUT_GRAMMAR}


def test_of_all_formats_but_those_of_the_table_history_is_shown() -> None:
    without = {name for name, each in TESTED.items() if not each.call_text and not showing()[name]}
    assert without == WITHOUT_HISTORY


@pytest.mark.parametrize("name", WRITABLE)
@given(data=st.data())
@slow(8)
def test_what_a_grammar_allows_is_read_shown_and_read_again(name: str, data: st.DataObject) -> None:
    each = TESTED[name]
    lark = Written(data.draw, each.form.gap if each.form else "")
    calls = data.draw(calls_of(each))
    shown_tools = [tool(call.name, lark.schema(call.arguments)) for call in calls]
    tools = [tool_of(shown["function"]) for shown in shown_tools]
    text = written(each, lark, tools)
    assert takes(source_of(each, tools), text), text
    reader = reader_of(each)
    assert same(read_whole(reader, text, False, shown_tools), calls), text
    splitter = reader.splitter(False, shown_tools)
    streamed(splitter, text, is_complete=True)
    assert same(splitter.collector.parts, calls), text
    if each.call_text and each.grammar:
        text = each.grammar.text(each.call_text(call.name, call.arguments) for call in calls)
        assert same(read_whole(reader, text, False, shown_tools), calls), text
    words = data.draw(WORDS), data.draw(WORDS)
    for family in showing()[name]:
        is_reasoning, is_content = family.words
        parts = AnswerParts(words[0] * is_reasoning, words[1] * is_content, tuple(calls[:1]))
        is_thinking, text = family.text(parts, shown_tools)
        found = read_whole(family.reader, text, is_thinking, shown_tools)
        assert told(found) == told(parts), (family.own.name, text)


# ---------------------------------------------------------------- by chance

TOOLS = [
    tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "flags": {"type": "array", "items": {"type": "boolean"}},
            },
            "required": ["city", "unit"],
        },
    ),
    tool("get", {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
        | {"$defs": {"N": {"type": "integer", "minimum": 0, "maximum": 5}}}),
    tool("stop", None),
]  # fmt: skip
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters", {}) for each in TOOLS}


@pytest.mark.parametrize("name", WRITABLE)
def test_what_a_grammar_lets_through_by_chance_is_read_as_calls_that_the_schemas_allow(
    name: str,
) -> None:
    each = TESTED[name]
    tools = [tool_of(shown["function"]) for shown in TOOLS]
    for seed in range(12):
        source = source_of(each, tools, is_parallel=bool(seed % 3))
        text = rolled(source, random.Random(seed))
        assert text, "limits end every value"
        parts = read_whole(reader_of(each), text, False, TOOLS)
        assert parts.calls and not parts.content, text
        assert seed % 3 or len(parts.calls) == 1, "several need leave"
        for call in parts.calls:
            jsonschema.validate(call.arguments, SCHEMAS[call.name])
        others = [tool for tool in tools if tool.name not in {call.name for call in parts.calls}]
        assert not others or not takes(source_of(each, others), text), "only named tools"
        for other in ("", "Let me see.", f"{text} and so on"):
            assert not takes(source, other), other


def test_a_format_without_nesting_refuses_lists_that_are_required() -> None:
    nested = ToolSchema("f", {"properties": {"a": {"type": "array"}}, "required": ["a"]})
    with pytest.raises(RequestError, match="'a', an array or an object"):
        source_of(TESTED["gemma-1"], [nested])
