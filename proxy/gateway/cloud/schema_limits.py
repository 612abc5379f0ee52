"""Refuses JSON schemas that LiteLLM would take gigabytes to read.

For Gemini, Bedrock and others it puts each $ref in its place, and holds for every object that it
has yet to read a table of all definitions. How much it puts in place is limited in litellm_server.
"""

from typing import Any, Final

from hearth.shared.errors import RequestError

ROOM_MAX: Final = 10_000_000  # JSON values of a schema, times its definitions: half a GB
_FIELDS: Final = (
    *("tools", "functions", "response_format", "text", "output_format", "output_config"),
)
_DEFINITIONS: Final = ("$defs", "definitions", "schemas")


def check_schemas(body: dict[str, Any]) -> None:
    """Refuse a schema in `body` that is over ROOM_MAX. Raises: RequestError: 400."""
    for name in _FIELDS:
        value = body.get(name)
        for schema in value if type(value) is list else [value]:
            values, definitions = _counts(schema)
            if values * definitions > ROOM_MAX:
                raise RequestError(
                    f"{name} has a schema of {values:,} JSON values and {definitions:,} "
                    f"definitions, and this server sends a cloud model at most {ROOM_MAX:,} of "
                    "both multiplied. Define fewer.",
                    param=name,
                )


def _counts(schema: Any) -> tuple[int, int]:
    """Return how many JSON values and how many definitions there are within `schema`."""
    waiting = [schema]
    values = definitions = 0
    while waiting:
        value = waiting.pop()
        values += 1
        if type(value) is dict:
            defined = (value[name] for name in _DEFINITIONS if type(value.get(name)) is dict)
            definitions += sum(map(len, defined))
            waiting += value.values()
        elif type(value) is list:
            waiting += value
    return values, definitions
