"""Constrained answers of real models with random weights, which say anything that they may."""

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints, Sampling
from hearth.worker.constraint.grammar_trial import GrammarError
from scripts.harness.constrained_answers import Asked, GuidedMachine, Schemas, tool
from scripts.harness.model_families import FAMILIES, Family, family

EXAMPLES = 60
TOKENS_MAX = 200
TOOLS = [
    tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "city": {"type": "string", "maxLength": 8},
            },
            "required": ["unit", "days"],
        },
    ),
    tool(
        "switch",
        {
            "type": "object",
            "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
            "required": ["flags"],
        },
    ),
    tool("stop", None),
]
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters", {}) for each in TOOLS}
KINDS = ("qwen3", "qwen3_5", "harmony", "mistral")  # JSON, elements, channels, names before JSON
CALLING = [
    pytest.param(name, marks=() if name in KINDS else pytest.mark.night)
    for name, each in FAMILIES.items()
    if each.calls_max != 0
]


def hot(seed: int) -> Sampling:
    return Sampling(temperature=1.0, seed=seed)


def content_of(asked: Asked, family: Family) -> str:
    return family.reader.read(asked.text, family.reader.is_thinking_open(asked.opening), []).content


def faults(value: Any, schema: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]


def test_an_answer_fits_its_schema_or_was_cut_off_or_was_refused() -> None:
    qwen3 = family("qwen3")
    machine, schemas = GuidedMachine(qwen3), Schemas(seed=5)
    outcomes: Counter[str] = Counter()
    asked: list[tuple[Asked, dict[str, Any]]] = []
    for seed in range(EXAMPLES):
        schema = schemas.one()
        constraints = Constraints(is_json=True, schema=schema)
        try:
            one = machine.put(constraints, None, hot(seed), TOKENS_MAX, enable_thinking=False)
            asked.append((one, schema))
        except RequestError as error:
            assert 'Unimplemented keys: ["not"]' in str(error)
            assert '"not"' in json.dumps(schema)
            outcomes["refused"] += 1
        if seed % 4 == 3:
            machine.run()
    machine.run()
    for one, schema in asked:
        assert one.guide is not None and not one.guide.failure
        outcomes[one.reason] += 1
        if one.reason == "stop":
            assert faults(json.loads(content_of(one, qwen3)), schema) == []
    assert outcomes["stop"] + outcomes["length"] + outcomes["refused"] == EXAMPLES
    assert outcomes["stop"] >= 0.8 * (EXAMPLES - outcomes["refused"]), outcomes


@pytest.mark.parametrize("name", CALLING)
def test_a_forced_call_is_of_an_allowed_tool_with_arguments_that_fit(name: str) -> None:
    model = family(name)
    machine = GuidedMachine(model)
    for allowed in (["get_weather"], ["switch"], ["stop", "switch"], []):
        constraints = Constraints(
            tool_choice="required", tool_names=allowed, parallel_calls=False, thinking_budget=10
        )
        one = machine.ask_one(constraints, TOOLS, hot(len(allowed)), tokens_max=TOKENS_MAX)
        assert one.reason == "stop", one.text
        is_thinking = model.reader.is_thinking_open(one.opening)
        parts = model.reader.read(one.text, is_thinking, TOOLS)
        (call,) = parts.calls
        assert call.name in (allowed or SCHEMAS)
        assert faults(call.arguments, SCHEMAS[call.name]) == []
        assert parts.content == ""


@pytest.mark.parametrize("fixture", ["qwen3", "qwen3_5"])
def test_each_answer_of_a_batch_is_held_to_its_own(fixture: str) -> None:
    model = family("qwen3")
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}
    wanted = {"type": "object", "properties": {"flags": flags}, "required": ["flags"]}
    wanted["additionalProperties"] = False

    def ask(machine: GuidedMachine) -> list[Asked]:
        asked = [
            machine.put(
                Constraints(is_json=True, schema=wanted), None, hot(1), enable_thinking=False
            ),
            machine.put(
                Constraints(tool_choice="required", tool_names=["get_weather"]),
                TOOLS,
                hot(2),
                enable_thinking=False,
            ),
            machine.put(Constraints(), None, hot(3), 60),
        ]
        return asked

    machine = GuidedMachine(model, fixture)
    answer, call, free = ask(machine)
    decoder = machine.engine.decoder
    sizes = set()
    machine.run(until=lambda: bool(sizes.add(sum(map(len, decoder.batch_keys)))))
    assert max(sizes) >= 2, "they decode together"
    assert (answer.reason, free.reason) == ("stop", "length")
    assert faults(json.loads(content_of(answer, model)), wanted) == []
    calls = model.reader.read(call.text, False, TOOLS).calls
    assert calls and {each.name for each in calls} == {"get_weather"}
    assert faults(calls[0].arguments, SCHEMAS["get_weather"]) == []


def test_a_guide_that_breaks_harms_no_neighbour() -> None:
    model = family("qwen3")
    plain = GuidedMachine(model).ask_one(Constraints(), sampling=hot(3), tokens_max=40)
    machine = GuidedMachine(model)
    long = Constraints(is_json=True, schema={"type": "string", "minLength": 500})
    broken = machine.put(long, None, hot(1), 40, enable_thinking=False)
    free = machine.put(Constraints(), sampling=hot(3), tokens_max=40)
    machine.run(until=lambda: len(broken.answer.request.sampled) > 5)
    assert broken.guide is not None and broken.guide._answer is not None
    mark = model.tokenizer.convert_tokens_to_ids("<tool_call>")
    with pytest.raises(GrammarError):
        broken.guide._answer.mask([mark])
    machine.run()
    assert broken.guide.failure
    assert free.answer.request.sampled == plain.answer.request.sampled
