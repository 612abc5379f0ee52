"""Checks the grammars of whole answers, with thinking and calls, and the schemas it refuses."""

import json
from copy import deepcopy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.grammar_compiler import GRAMMAR_BYTES
from hearth.worker.constraint.token_mask import TokenMask
from scripts.fixtures import checkpoint_files
from scripts.harness.constrained_answers import Walk, constrainer_for, tool, walk
from scripts.harness.model_families import FAMILIES, bare_tokenizer, family
from tests.helpers.cases import cases
from tests.helpers.worker.output_formats import reader

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ANSWER = '{"city": "Ulm"}'
JSON = Constraints(is_json=True, schema=CITY)
CALL = Constraints(tool_choice="required")
TOOLS = [tool("f", CITY)]


def begun(
    name: str, constraints: Constraints, opening: str = "", tools: list[Any] | None = None
) -> Walk:
    return walk(constrainer_for(family(name)), constraints, tools or [], opening)


# ---------------------------------------------------------------- thinking, then the answer


@pytest.mark.parametrize("case", cases("constraint/whole_answers.yaml"))
def test_an_answer_is_what_was_asked_for_and_nothing_else(case: dict[str, Any]) -> None:
    name, opening = case["family"], case.get("opening", "")
    tools = TOOLS if "tools" in case else []
    tokens_of = family(name).tokenizer.encode
    for verdict in ("taken", "refused"):
        for text in case[verdict]:
            started = begun(name, Constraints(**case["asked"]), opening, tools)
            is_taken = started.takes(tokens_of(text, add_special_tokens=False))
            assert is_taken == (verdict == "taken"), text


# ---------------------------------------------------------------- no calls


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "glm4", "mistral"])
def test_where_no_call_is_wanted_its_mark_alone_is_banned(name: str) -> None:
    tokenizer = family(name).tokenizer
    allowed = begun(name, Constraints(tool_choice="none"), tools=TOOLS).allowed()
    everything = set(range(checkpoint_files.VOCAB_SIZE))
    assert everything - allowed == {tokenizer.convert_tokens_to_ids(tokenizer.tool_call_start)}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_free_answer_has_no_guide(name: str) -> None:
    found = constrainer_for(family(name))
    assert found.token_mask(Constraints(), TOOLS, "", 0) is None
    assert found.token_mask(Constraints(parallel_calls=False), TOOLS, "", 0) is None
    if not family(name).thinks:
        assert found.token_mask(Constraints(thinking_budget=5), TOOLS, "", 0) is None


# ---------------------------------------------------------------- the budget


# ---------------------------------------------------------------- what is refused


def refused(constraints: Constraints, tools: list[Any] | None = None, name: str = "llama3") -> str:
    found = constrainer_for(family(name))
    with pytest.raises(RequestError) as caught:
        found.token_mask(constraints, tools or [], "", 0)
    assert caught.value.status == 400
    return str(caught.value)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/$defs/Lost"}, "Pointer '/$defs/Lost' does not exist"),
        ({"$ref": "https://example.com/s.json"}, "not present"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater"),
        ({"type": "string", "format": "colour"}, "Unknown format: colour"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": []}, "anyOf is empty"),
        ({"$ref": "#/properties/part"}, "holds itself without an end"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(
    part: dict[str, Any], words: str
) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "string"}, "part": part}}
    text = refused(Constraints(is_json=True, schema=schema | {"required": ["part"]}))
    assert "The JSON schema of the answer at /properties/part: " in text
    assert words in text
    assert "%llguidance" not in text and "<state>" not in text


def test_a_schema_that_only_refers_to_itself_is_refused() -> None:
    text = refused(Constraints(is_json=True, schema={"$ref": "#"}))
    assert "of the answer at /: no value is allowed: it holds itself without an end" in text


def test_a_schema_that_is_too_large_or_too_deep_is_refused() -> None:
    large = {"enum": ["x" * 100] * 11_000}
    assert "of the answer is 1,144,0" in refused(Constraints(is_json=True, schema=large))
    larger = refused(Constraints(is_json=True, schema={"enum": ["x" * 100] * 30_000}))
    assert "bytes; the limit is 1,000,000" in larger, "one limit, however far it is passed"
    text = refused(CALL, [tool(f"t{n}", large) for n in range(2)])
    assert "The grammar of the tools" in text and "together is 2,000,000" in text
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    deeply = refused(Constraints(is_json=True, schema=deep))
    assert "recursion" in deeply or "nested too deeply" in deeply, "Pythons differ"
    for _ in range(50_000):
        deep = {"items": deep}
    assert "nested too deeply" in refused(Constraints(is_json=True, schema=deep))


def test_a_tool_that_is_not_there_cannot_be_asked_for() -> None:
    assert "'g'" in refused(Constraints("required", tool_names=["g"]), TOOLS)
    assert "any tool" in refused(CALL, [])


# ---------------------------------------------------------------- guides


def test_a_compiled_grammar_is_kept_and_each_answer_has_its_own_place_in_it() -> None:
    found = constrainer_for(family("llama3"))
    first, second = walk(found, JSON, []), walk(found, JSON, [])
    assert found.report()["remembered"] == 1
    tokens = family("llama3").tokenizer.encode(ANSWER, add_special_tokens=False)
    assert first.takes(tokens)
    assert second.takes(tokens)


def test_the_remembered_grammars_of_one_key_take_nothing_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "hearth.worker.constraint.grammar_compiler"
    monkeypatch.setattr(f"{module}.HELD_BYTES_MAX", 40 << 20, raising=False)
    made = constrainer_for(family("llama3"))
    mine = Constraints(is_json=True, schema={"const": "mine"})
    made.token_mask(mine, [], "", 0, "b")
    for n in range(12):
        made.token_mask(Constraints(is_json=True, schema={"const": n}), [], "", 0, "a")
    assert made.report()["remembered"] == (40 << 20) // GRAMMAR_BYTES
    monkeypatch.setattr(f"{module}.GrammarBuild", None)
    assert made.token_mask(mine, [], "", 0, "b") is not None


def test_logits_without_a_token_are_never_chosen_and_the_width_is_the_models() -> None:
    found = constrainer_for(family("llama3"))
    for width in (checkpoint_files.VOCAB_SIZE + 64, checkpoint_files.VOCAB_SIZE, 2_000):
        guide = found.token_mask(JSON, [], "", 0)
        assert guide is not None
        logits = guide.process(mx.array([], dtype=mx.uint32), mx.zeros((1, width)))
        assert logits.shape == (1, width)
        assert np.isinf(np.array(logits[0, checkpoint_files.VOCAB_SIZE :])).all()


def test_a_matcher_that_breaks_is_told_and_the_answer_goes_on_unheld(
    capfd: pytest.CaptureFixture[str],
) -> None:
    started = begun("llama3", JSON)
    started.tokens = family("llama3").tokenizer.encode("nonsense", add_special_tokens=False)
    zeros = mx.zeros((1, 10))
    assert started.guide.process(mx.array(started.tokens), zeros) is zeros
    assert started.guide.failure
    assert started.guide.process(mx.array([1]), zeros) is zeros
    assert "Parser Error" not in capfd.readouterr().err, "llguidance quotes the answer to stderr"


@pytest.mark.parametrize("text", [ANSWER, ANSWER + "<|eot_id|>", ANSWER + "<|eot_id|> more"])
def test_what_follows_an_answer_that_ended_breaks_nothing(text: str) -> None:
    """Decoding is one token ahead of what ends a request."""
    started = begun("llama3", JSON)
    started.tokens = family("llama3").tokenizer.encode(text, add_special_tokens=False)
    assert started.allowed() == started.ends


def test_the_prompt_is_not_part_of_the_answer() -> None:
    found = constrainer_for(family("llama3"))
    guide = found.token_mask(JSON, [], "", prompt_tokens=3)
    assert isinstance(guide, TokenMask)
    answer = family("llama3").tokenizer.encode(ANSWER, add_special_tokens=False)
    guide.process(mx.array([7, 8, 9, *answer]), mx.zeros((1, checkpoint_files.VOCAB_SIZE)))
    assert not guide.failure


def test_a_mark_of_the_format_is_no_text_whatever_the_tokenizer_says_of_it() -> None:
    base = deepcopy(bare_tokenizer(family("llama3").tokenizer))
    base.add_tokens([AddedToken("[TOOL_CALLS]", special=False), AddedToken("  ", special=False)])
    made = constrainer_for(family("llama3"), TokenizerWrapper(base), reader("magistral"))
    config = json.loads(made.tokenizer_config())
    is_special = {token["content"]: token["special"] for token in config["added_tokens"]}
    assert is_special["[TOOL_CALLS]"]
    assert not is_special["  "]
