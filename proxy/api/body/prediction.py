"""Reads OpenAI's `prediction`: the text that a client expects its answer to repeat.

It is there to draft from and says nothing to the model: the prompt is the same without it.
"""

from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body
from hearth.shared.errors import RequestError

CHARS_MAX: Final = 1_000_000
PARTS_MAX: Final = 1_000


def read_prediction(body: Body, choices: int) -> str:
    """Return the predicted text; "" where there is none.

    Raises:
        RequestError: it is not what the API allows, too long, or there are several `choices`:
            they are decoded together, and nothing is drafted for them.
    """
    if body.get("prediction") is None:
        return ""
    given = fields.record(body["prediction"], "prediction")
    if given.get("type") != "content":
        fields.refuse("prediction.type", given.get("type"), "'content'")
    if choices > 1:
        fields.refuse("n", choices, "1 together with prediction")
    content: Any = given.get("content")
    text: str = content
    if type(content) is not str:
        if type(content) is not list or len(content) > PARTS_MAX:
            allowed = f"a string or a list of up to {PARTS_MAX:,} text parts"
            fields.refuse("prediction.content", content, allowed)
        parts = fields.records(content, "prediction.content")
        text = "".join(_text(part, param) for part, param in parts)
    if len(text) > CHARS_MAX:
        raise RequestError(
            f"prediction has {len(text):,} characters and this server accepts {CHARS_MAX:,}. "
            f"Remove at least {len(text) - CHARS_MAX:,}.",
            code="prediction_too_long",
            param="prediction",
        )
    return text


def _text(part: dict[str, Any], param: str) -> str:
    if part.get("type") != "text":
        fields.refuse(f"{param}.type", part.get("type"), "'text'")
    text = fields.text(part, "text", f"{param}.text")
    if text is None:
        fields.refuse(f"{param}.text", None, "a string")
    return text
