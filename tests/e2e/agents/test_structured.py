"""Constrained answers of one batch: each is held to its own grammar, and harms no neighbour."""

import json
from typing import Any

import jsonschema
import pytest

from hearth.shared.wire_messages import Constraints, Sampling
from hearth.worker.constraint.grammar_trial import GrammarError
from scripts.harness.constrained_answers import Asked, GuidedMachine, tool
from scripts.harness.model_families import Family, family
from tests.helpers.worker.output_formats import read_whole

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
]
WEATHER = TOOLS[0]["function"]["parameters"]


def hot(seed: int) -> Sampling:
    return Sampling(temperature=1.0, seed=seed)


def content_of(asked: Asked, family: Family) -> str:
    return read_whole(
        family.reader, asked.text, family.reader.is_thinking_open(asked.opening), []
    ).content


def faults(value: Any, schema: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize("fixture", ["qwen3", "qwen3_5"])
def test_each_answer_of_a_batch_is_held_to_its_own(fixture: str) -> None:
    model = family("qwen3")
    flags = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}
    wanted = {"type": "object", "properties": {"flags": flags}, "required": ["flags"]}
    wanted["additionalProperties"] = False

    forced = Constraints(tool_choice="required", tool_names=["get_weather"])
    machine = GuidedMachine(model, fixture)
    json_answer = Constraints(is_json=True, schema=wanted)
    answer = machine.put(json_answer, None, hot(1), enable_thinking=False)
    call = machine.put(forced, TOOLS, hot(2), enable_thinking=False)
    free = machine.put(Constraints(), None, hot(3), 60)
    decoder = machine.engine.decoder
    sizes = set()
    machine.run(until=lambda: bool(sizes.add(sum(map(len, decoder.batch_request_ids)))))
    assert max(sizes) >= 2, "they decode together"
    assert (answer.reason, free.reason) == ("stop", "length")
    assert faults(json.loads(content_of(answer, model)), wanted) == []
    calls = read_whole(model.reader, call.text, False, TOOLS).calls
    assert calls and {each.name for each in calls} == {"get_weather"}
    assert faults(calls[0].arguments, WEATHER) == []


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
