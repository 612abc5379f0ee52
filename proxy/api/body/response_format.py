"""Reads the format that an answer has to have, as the OpenAI dialects ask for it."""

from typing import Any

from hearth.proxy.api.body import field_readers as fields


def read_format(value: Any, param: str, inner: str = "") -> dict[str, Any]:
    """Return the fields of Constraints that `value` asks for: none where any text is allowed.

    A schema is in its field `inner`, or in itself.

    In itself also where the API has it in `inner`, and with a json_object: llama.cpp takes both.

    Raises:
        RequestError: it is none of the API's, or its schema is not an object.
    """
    row = {} if value is None else fields.record(value, param)
    kind = row.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object" and row.get("schema") is None:
        return {"is_json": True}
    if kind not in ("json_object", "json_schema"):
        fields.refuse(f"{param}.type", kind, "text, json_object or json_schema")
    is_nested = bool(inner) and row.get("schema") is None
    where = f"{param}.{inner}" if is_nested else param
    holder = fields.record(row.get(inner), where) if is_nested else row
    fields.text(holder, "name", f"{where}.name")
    if (strict := holder.get("strict")) is not None and type(strict) is not bool:
        fields.refuse(f"{where}.strict", strict, "true or false; it always holds here")
    return {"is_json": True, "schema": fields.record(holder.get("schema"), f"{where}.schema")}
