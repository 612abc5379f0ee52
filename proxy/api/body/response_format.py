"""Reads the format that an answer has to have, as the OpenAI dialects ask for it."""

from dataclasses import dataclass
from typing import Any

from hearth.proxy.api.body import field_readers as fields


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The answer's format: any text, one JSON object, or JSON of a schema."""

    is_json: bool = False
    schema: dict[str, Any] | None = None


def read_format(value: Any, param: str, inner: str = "") -> ResponseFormat:
    """Return the format that `value` asks for; a schema is in its field `inner`, or in itself.

    Raises:
        RequestError: it is none of the API's, or its schema is not an object.
    """
    if value is None:
        return ResponseFormat()
    row = fields.record(value, param)
    kind = row.get("type", "text")
    if kind == "text":
        return ResponseFormat()
    if kind == "json_object":
        return ResponseFormat(is_json=True)
    if kind != "json_schema":
        fields.refuse(f"{param}.type", kind, "text, json_object or json_schema")
    where = f"{param}.{inner}" if inner else param
    holder = fields.record(row.get(inner), where) if inner else row
    fields.text(holder, "name", f"{where}.name")
    if (strict := holder.get("strict")) is not None and type(strict) is not bool:
        fields.refuse(f"{where}.strict", strict, "true or false; it always holds here")
    return ResponseFormat(
        is_json=True, schema=fields.record(holder.get("schema"), f"{where}.schema")
    )
