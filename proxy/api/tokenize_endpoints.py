"""Serves `/tokenize`, `/detokenize` and `/apply-template` for clients of llama.cpp and vLLM.

Each response has the fields of both servers. Messages give the same tokens as a request with the
same body, sampled turns included, and the same count as `count_tokens`.
"""

import itertools
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.completions.parse import TOKEN_ID_MAX
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Counted, Prompt, TokenQuery

TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
APPLY_TEMPLATE: Final = "/apply-template"
PATHS: Final = (TOKENIZE, DETOKENIZE, APPLY_TEMPLATE)
TEXT_BYTES_MAX: Final = 1024 * 1024  # gives 17 MB of JSON with pieces, encoded in 0.1 s
_PIECE_WEIGHT: Final = 8  # work for a token with its text, relative to its id alone


def raw_prompt(path: str, body: Mapping[str, Any]) -> tuple[Prompt, TokenQuery] | None:
    """Return the text or the tokens in `body` with the query about them; None for messages.

    By default a beginning-of-text token precedes vLLM's `prompt`, but not llama.cpp's `content`.

    Raises:
        RequestError: a field has an invalid value, or the text is too long.
    """
    if path == DETOKENIZE:
        ids = fields.json_list(body.get("tokens"), "tokens")
        for index, token_id in enumerate(ids):
            if type(token_id) is not int or not 0 <= token_id <= TOKEN_ID_MAX:
                fields.refuse(f"tokens[{index}]", token_id, "the id of a token")
        prompt = Prompt([], ids=ids) if ids else Prompt([], text="")
        return prompt, TokenQuery("text", adds_beginning=False)
    name = next((name for name in ("content", "prompt") if body.get(name) is not None), "")
    if path == APPLY_TEMPLATE or not name or "messages" in body or "input" in body:
        return None
    text = fields.text(body, name) or ""
    if (size := len(text.encode("utf-8", "surrogatepass"))) > TEXT_BYTES_MAX:
        raise RequestError(
            f"{name} is {size:,} bytes and {path} takes {TEXT_BYTES_MAX:,}. Send it in parts.",
            status=413,
            code="text_too_long",
            param=name,
        )
    switch = "add_special" if name == "content" else "add_special_tokens"
    query = TokenQuery(
        _wanted_form(body),
        adds_beginning=fields.boolean(body, switch, default=name == "prompt"),
        reads_controls=fields.boolean(body, "parse_special", default=True),
    )
    return Prompt([], text=text), query


def template_query(path: str, body: Mapping[str, Any]) -> TokenQuery:
    """Return the query about the messages of `body`.

    Raises:
        RequestError: the body has no messages, or wants another template than the model's own.
    """
    if body.get("messages") is None and body.get("input") is None:
        needed = "messages" if path == APPLY_TEMPLATE else "content, prompt or messages"
        raise RequestError(f"{path} needs {needed}.", code="missing_field", param="messages")
    if body.get("chat_template") is not None:
        fields.refuse("chat_template", body["chat_template"], "none: the model's own is used")
    wanted = "text" if path == APPLY_TEMPLATE else _wanted_form(body)
    has_header = fields.boolean(body, "add_generation_prompt", default=True)
    continues = fields.boolean(body, "continue_final_message")  # the last message has the header
    return TokenQuery(wanted, adds_header=has_header or continues)


def answer_size(counted: Counted) -> int:
    """Return the work of `answer` as a size: a body of so many bytes takes about as long."""
    return len(counted.ids) * (_PIECE_WEIGHT if counted.piece_ends else 1) + len(counted.text)


def answer(
    path: str, body: Mapping[str, Any], counted: Counted, context_tokens: int | None
) -> bytes:
    """Return the body of the response. Any thread."""
    if path == DETOKENIZE:
        return orjson.dumps({"content": counted.text, "prompt": counted.text})
    if path == APPLY_TEMPLATE:
        return orjson.dumps({"prompt": counted.text})
    ids = _numbers(counted.ids)
    data: dict[str, Any] = {
        "count": counted.tokens,
        "max_model_len": context_tokens,
        "tokens": ids,
        "token_strs": None,
    }
    if fields.boolean(body, "with_pieces"):
        tokens = zip(ids, _pieces(counted), strict=True)
        data["tokens"] = [{"id": token_id, "piece": _shown(piece)} for token_id, piece in tokens]
    if fields.boolean(body, "return_token_strs"):
        data["token_strs"] = [piece.decode("utf-8", "replace") for piece in _pieces(counted)]
    return orjson.dumps(data)


def _wanted_form(body: Mapping[str, Any]) -> str:
    wants = [fields.boolean(body, name) for name in ("with_pieces", "return_token_strs")]
    return "pieces" if any(wants) else "ids"


def _numbers(packed: bytes) -> list[int]:
    numbers = array("I", packed)
    assert numbers.itemsize == 4, "C's int does not have 4 bytes on this machine"
    return numbers.tolist()


def _pieces(counted: Counted) -> Iterator[bytes]:
    ends = _numbers(counted.piece_ends)
    return (counted.pieces[start:end] for start, end in itertools.pairwise([0, *ends]))


def _shown(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if it is part of a character, as llama.cpp does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
