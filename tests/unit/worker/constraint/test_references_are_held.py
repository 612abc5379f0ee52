"""References of every form, and keywords that no grammar can hold: what is accepted also holds.

An answer's schema is one grammar for every dialect; calls have one for each format of calls.
"""

import json
from typing import Any, Final

import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.call_grammars import GRAMMAR_CHARS_MAX, Lark
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from scripts.harness.constrained_answers import constrainer_for, tool, walk
from scripts.harness.model_families import family
from tests.helpers.cases import cases
from tests.helpers.worker.output_formats import reader

pytestmark = pytest.mark.process

ANSWER: Final = "an answer"
WAYS: Final = (ANSWER, "qwen3", "qwen3_5", "glm4")  # or a call of that family
REQUIRED: Final = Constraints(tool_choice="required")


def compiler_of(way: str) -> GrammarCompiler:
    return constrainer_for(family("llama3" if way == ANSWER else way))


def written(way: str, value: dict[str, Any]) -> str:
    """Return the answer, or the call of the tool `f`, that gives `value`."""
    rows = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in value.items()]
    if way == "qwen3_5":
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in rows)
        return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    if way == "glm4":
        pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        return f"<tool_call>f\n{''.join(pair.format(*row) for row in rows)}</tool_call>"
    text = json.dumps(value, ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    return text if way == ANSWER else call


def takes(made: GrammarCompiler, way: str, schema: Any, value: Any, others: Any = ()) -> bool:
    """Tell whether the schema lets `value` be written, as an answer or in a forced call."""
    is_answer = way == ANSWER
    asked = Constraints(is_json=True, schema=schema) if is_answer else REQUIRED
    started = walk(made, asked, [] if is_answer else [*others, tool("f", schema)])
    text = written(way, value)
    return started.takes(list(made.tokenizer.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", cases("constraint/schema_references.yaml", "held"))
def test_a_reference_to_anything_in_the_document_is_held(case: Any, way: str) -> None:
    made = compiler_of(way)
    assert takes(made, way, case["schema"], case["good"])
    for value in case["bad"]:
        assert not takes(made, way, case["schema"], value), value


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("case", cases("constraint/schema_references.yaml", "left out of calls"))
def test_a_keyword_that_cannot_be_held_refuses_no_forced_call_and_the_rest_holds(
    case: Any, way: str
) -> None:
    """Also beside a sound tool; and what is left out forbids nothing that was allowed."""
    made, sound = compiler_of(way), [tool("g", {"properties": {"a": {"type": "integer"}}})]
    sent = json.dumps(case["schema"])
    assert takes(made, way, case["schema"], case["good"], sound)
    for value in case.get("bad", ()):
        assert not takes(made, way, case["schema"], value, sound), value
    assert json.dumps(case["schema"]) == sent, "the prompt shows it as it was sent"


def test_gemmas_parts_of_an_all_of_hide_no_required_property() -> None:
    integer = {"type": "integer"}
    objects = [{"type": "object", "properties": {n: integer}, "required": [n]} for n in "ab"]
    schema = {"type": "object", "properties": {"p": {"allOf": objects}}, "required": ["p"]}
    base = family("gemma3")

    def takes_call(value: str) -> bool:
        text = f"<|tool_call>call:f{{p:{value}}}<tool_call|>"
        started = walk(
            constrainer_for(base, reader=reader("gemma4")), REQUIRED, [tool("f", schema)]
        )
        return started.takes(list(base.tokenizer.encode(text, add_special_tokens=False)))

    assert takes_call("{a:1,b:2}")
    assert not takes_call("{a:1}")


# ---------------------------------------------------------------- bombs


def test_a_grammar_above_its_limit_is_not_written_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """47 KB of references to the root were 134 MB of grammar, and then a 400."""
    written = [0]
    rule = Lark.rule

    def counted(lark: Lark, body: str, options: str = "") -> Any:
        written[0] += len(body)
        return rule(lark, body, options)

    monkeypatch.setattr(Lark, "rule", counted)
    properties = {f"p{n}": {"$ref": "#"} for n in range(400)}
    schema = {"type": "object", "properties": properties, "description": "x" * 20_000}
    with pytest.raises(RequestError):
        compiler_of("qwen3_5").token_mask(REQUIRED, [tool("f", schema)], "", 0)
    assert written[0] < 2 * GRAMMAR_CHARS_MAX
