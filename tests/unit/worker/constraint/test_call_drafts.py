"""Checks which tokens of a call are forced in an answer that no grammar is enforced on."""

from collections import Counter
from typing import Any

import pytest

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import call_drafts
from hearth.worker.constraint.call_drafts import CallDrafts, ForcedTexts
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.text_shape import Concat, JsonString, Literal, Order
from hearth.worker.formats.shared.output_format import OutputFormat
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family
from tests.helpers.worker.output_formats import StandIn

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
TOOLS = [tool("get_weather", WEATHER), tool("stop", None)]

# Family -> a call as the model writes it, and the share of its tokens that is forced at least.
WRITTEN = {
    "qwen3": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "celsius"}}'
        "\n</tool_call>",
        0.6,
    ),
    "qwen3_5": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nUlm\n</parameter>\n"
        "<parameter=unit>\ncelsius\n</parameter>\n</function>\n</tool_call>",
        0.6,
    ),
    "glm4": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
        "<arg_key>unit</arg_key>\n<arg_value>celsius</arg_value>\n</tool_call>",
        0.5,
    ),
    "harmony": (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Ulm","unit":"celsius"}',
        0.4,
    ),
    "llama3": (
        '{"name": "get_weather", "parameters": {"city": "Ulm", "unit": "celsius"}}',
        0.6,
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Ulm", "unit": "celsius"}}]',
        0.6,
    ),
}
QWEN = WRITTEN["qwen3"][0]


def tokens_of(text: str, name: str = "qwen3") -> list[int]:
    return list(family(name).tokenizer.encode(text, add_special_tokens=False))


def compiler_for(name: str = "qwen3") -> GrammarCompiler:
    return constrainer_for(family(name))


def drafts_of(compiler: GrammarCompiler, tools: list[Any] | None = None) -> CallDrafts:
    found = compiler.call_drafts(Constraints(), TOOLS if tools is None else tools)
    assert found is not None
    return found


def forced_count(drafts: CallDrafts, answer: list[int]) -> int:
    """Return how many of an answer's tokens were forced; fail where one is that does not come."""
    place = count = 0
    while place < len(answer):
        forced = drafts.forced(99)
        assert forced == answer[place : place + len(forced)]
        count += len(forced)
        drafts.take(answer[place : place + len(forced) + 1])
        place += len(forced) + 1
    return count


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_written_as_usual_is_forced_in_large_part(name: str) -> None:
    text, share = WRITTEN[name]
    answer = tokens_of(text, name)
    assert forced_count(drafts_of(compiler_for(name)), answer) >= share * len(answer)


def test_text_around_calls_has_no_forced_tokens_and_each_call_has() -> None:
    compiler = compiler_for()
    drafts, call, text = drafts_of(compiler), tokens_of(QWEN), tokens_of("And so on. ")
    alone = forced_count(drafts_of(compiler), call)
    assert forced_count(drafts, [*call, *text, *call, *text]) == 2 * alone
    assert not drafts.positions
    assert drafts.forced(9) == []


def test_only_free_answers_with_tools_and_a_known_format_are_drafted() -> None:
    compiler = compiler_for()
    assert compiler.call_drafts(Constraints(), []) is None
    assert compiler.call_drafts(Constraints(tool_choice="none"), TOOLS) is None
    assert compiler.call_drafts(Constraints(tool_choice="required"), TOOLS) is None
    assert compiler.call_drafts(Constraints(is_json=True), TOOLS) is None
    assert compiler.call_drafts(Constraints(), TOOLS) is not None
    unknown = constrainer_for(family("qwen3"), reader=OutputFormat(StandIn(), "unheard of"))
    assert unknown.call_drafts(Constraints(), TOOLS) is None


def test_what_may_come_is_told_up_to_where_something_must_come() -> None:
    drafts = drafts_of(compiler_for())
    drafts.take(tokens_of('<tool_call>\n{"name": "get_weather", "arguments": {"city": "U'))
    known = tokens_of('lm", "town": "x')
    count, then = drafts.fitting([], known)
    assert count == len(tokens_of('lm", "')) and then == []
    count, then = drafts.fitting(tokens_of('lm", "'), tokens_of("unit"))
    assert family("qwen3").tokenizer.decode(tokens_of("unit")[:count] + then) == 'unit":'
    drafts.take(tokens_of('lm", "unit": "celsius"'))
    count, then = drafts.fitting([], tokens_of("}}\n"))
    assert family("qwen3").tokenizer.decode(tokens_of("}}\n")[:count] + then) == "}}\n</tool_call>"


def test_tools_of_no_shape_are_not_drafted_and_counted() -> None:
    compiler = compiler_for()
    wrong = tool("f", {"type": "object", "properties": {"a": {"enum": [float]}}})
    assert compiler.call_drafts(Constraints(), [wrong]) is None
    assert compiler.report()["call_drafts_ended"] == 1


# ---------------------------------------------------------------- with a shape that is made here

MARK = b"<call>"
SHAPE = Concat((Literal(b'<call>{"'), JsonString(), Literal(b"}")))


class Followed:
    """Drafts whose tokens are single bytes, and whose calls have `SHAPE`, or another."""

    def __init__(self, shape: Any = SHAPE, marks: tuple[int, ...] = ()) -> None:
        self.counts: Counter[str] = Counter()
        texts = ForcedTexts(lambda text: list(text.encode()), spelt, marks)
        self.drafts = CallDrafts(MARK.decode(), shape, Order(), texts, self.counts)


def spelt(token: int) -> bytes:
    return bytes([token])


def test_the_last_token_that_is_forced_is_told_where_none_is_longer() -> None:
    assert bytes(_forced(Followed())) == b"{", "the quote may be a longer token's first byte"
    assert bytes(_forced(Followed(marks=(ord('"'),)))) == b'{"', "a mark is whole"
    followed = Followed()
    followed.drafts.take(MARK + b'{"x"')
    assert bytes(followed.drafts.forced(9)) == b"}", "what is behind the call begins anew"


def _forced(followed: Followed) -> list[int]:
    followed.drafts.take(MARK)
    return followed.drafts.forced(9)


def test_text_that_only_looks_like_calls_is_left_and_the_next_call_is_followed() -> None:
    followed = Followed()
    followed.drafts.take((MARK + b"!") * 9)
    assert not followed.drafts.positions
    assert bytes(_forced(followed)) == b"{"


def test_a_long_call_is_followed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_drafts, "CALL_BYTES_MAX", 20)
    followed = Followed()
    followed.drafts.take(MARK + b'{"' + b"x" * 20)
    assert not followed.drafts.positions and not followed.counts


def test_a_bug_of_ours_leaves_the_answer_without_forced_tokens() -> None:
    followed = Followed(Concat((Literal(MARK), "no shape")))
    followed.drafts.take(MARK + b"x")
    assert followed.counts == {"call_drafts_ended": 1}
    followed.drafts.take(MARK)
    assert followed.drafts.forced(9) == []


def test_a_mark_that_ends_amid_a_token_opens_a_call() -> None:
    pieces = {100: b"..<ca", 101: b'll>{"', 102: b'<call>{"'}
    for tokens in ([100, 101], [102]):
        texts = ForcedTexts(lambda _: [], pieces.__getitem__, ())
        drafts = CallDrafts("<call>", SHAPE, Order(), texts, Counter())
        drafts.take(tokens)
        assert drafts.positions


def test_what_is_forced_is_put_into_tokens_once_for_each_owner() -> None:
    compiler = compiler_for()
    asked: list[str] = []
    compiler._tokens_of = lambda text: asked.append(text) or tokens_of(text)  # type: ignore
    counts = []
    for owner in ("a", "a", "b", None, None):
        drafts = compiler.call_drafts(Constraints(), TOOLS, owner)
        assert drafts is not None
        forced_count(drafts, tokens_of(QWEN))
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0
    assert counts[2] == 2 * counts[0], "how fast it is tells nobody what another's tools are"
    assert counts[3:] == [3 * counts[0], 4 * counts[0]], "a request apart leaves nothing"
