"""Times answers that must obey a JSON schema, and says how many do.

A model of random weights gives nearly the same answer each time, so that a server that drafts from
earlier answers gains more by it than with a real model.
"""

import json
from typing import Any, Final

from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.decode_cost import decoded, warm_up
from hearth.commands.bench.workloads.timed_stream import TimedAnswer, salt_of, timed_client

ANSWERS: Final = 4
# A whole answer takes some 150 in a small vocabulary, and less in a large one.
TOKENS_MAX: Final = 400
AREAS: Final = ("cache", "scheduler", "tokenizer", "proxy", "documentation")
_STEP: Final = {
    "type": "object",
    "properties": {
        "action": {"type": "string", "enum": ["read", "edit", "run", "ask"]},
        "area": {"type": "string", "enum": list(AREAS)},
        "is_risky": {"type": "boolean"},
    },
    "required": ["action", "area", "is_risky"],
    "additionalProperties": False,
}
# Nothing in it is without end: even a model of random weights comes to its last brace.
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "severity": {"type": "string", "enum": ["low", "medium", "high", "critical"]},
        "is_blocking": {"type": "boolean"},
        "steps": {"type": "array", "items": _STEP, "minItems": 3, "maxItems": 3},
    },
    "required": ["severity", "is_blocking", "steps"],
    "additionalProperties": False,
}
MORE: Final = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "plan", "strict": True, "schema": SCHEMA},
    },
    # What is measured is the answer, not what a model thinks before it.
    "chat_template_kwargs": {"enable_thinking": False},
}
_TYPES: Final[dict[str, type]] = {"object": dict, "array": list, "string": str, "boolean": bool}


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """Say whether a JSON value obeys a schema of the keywords that SCHEMA uses."""
    if not isinstance(value, _TYPES[schema["type"]]):
        return False
    if "enum" in schema:
        return value in schema["enum"]
    if isinstance(value, list):
        is_long = schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_long and all(obeys(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        parts = schema["properties"]
        is_whole = set(schema["required"]) <= set(value) <= set(parts)
        return is_whole and all(obeys(each, parts[name]) for name, each in value.items())
    return True


def is_valid(answer: TimedAnswer) -> bool:
    """Say whether the text of an answer is JSON that obeys SCHEMA, and nothing else."""
    if answer.error:
        return False
    try:
        return obeys(json.loads(answer.text), SCHEMA)
    except (ValueError, RecursionError):
        return False


async def run_structured(visit: Visit) -> Measured:
    """Ask for plans, one after another; one that is refused is an answer that does not obey."""
    salt = salt_of(visit, "structured")
    asked = [
        f"[{salt}, task {number + 1}] A user says that the {AREAS[number % len(AREAS)]} fails after"
        f" a restart. Answer with a plan of three steps, as JSON of this schema:"
        f" {json.dumps(SCHEMA)}"
        for number in range(ANSWERS)
    ]
    async with timed_client(visit) as client:
        await warm_up(visit, client)
        found = await decoded(visit, client, asked, TOKENS_MAX, MORE, is_serial=True)
    values = found.values()
    values["valid_share"] = sum(map(is_valid, found.whole.answers)) / ANSWERS
    # How long the answers are is the model's affair, and so is what they cost in all.
    for name in ("wall_s", "cpu_s", "written_bytes"):
        values.pop(name, None)
    return Measured(values, errors=found.errors())


WORKLOADS: Final = (
    Workload(
        name="structured",
        about=(
            f"{ANSWERS} answers that must obey a JSON schema (response_format), one after another,"
            " thinking off: how many obey, and their tokens a second, which are compared only where"
            " all obey. A server that ignores the schema is seen by its share of 0. A model of"
            " random weights gives nearly the same answer each time, so that a server that drafts"
            " from earlier ones gains more than with a real model. Gaps are between events, which"
            " may hold several tokens."
        ),
        start=Start.RESTARTED,
        run=run_structured,
    ),
)
