"""Serves `/tokenize`, `/detokenize` and `/apply-template`, as llama.cpp's and vLLM's clients ask.

Each answer has the fields of both servers. Messages are tokenised as a request with the same body
would be computed, sampled turns included: the count is that of `count_tokens`.
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
TEXT_BYTES_MAX: Final = 1024 * 1024  # with pieces: 17 MB of JSON, of which one call is 0.1 s
_PIECE_WEIGHT: Final = 8  # of a token that is told with its text, beside one that is not


def raw_prompt(path: str, body: Mapping[str, Any]) -> tuple[Prompt, TokenQuery] | None:
    """Return what is asked about a text or about tokens; None where it is about messages.

    A beginning-of-text token is put before vLLM's `prompt`; before llama.cpp's `content` on demand.

    Raises:
        RequestError: a field is not what both servers' clients send, or the text is too long.
    """
    if path == DETOKENIZE:
        ids = fields.rows(body.get("tokens"), "tokens")
        for index, each in enumerate(ids):
            if type(each) is not int or not 0 <= each <= TOKEN_ID_MAX:
                fields.refuse(f"tokens[{index}]", each, "the id of a token")
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
        _told(body),
        adds_beginning=fields.boolean(body, switch, default=name == "prompt"),
        reads_controls=fields.boolean(body, "parse_special", default=True),
    )
    return Prompt([], text=text), query


def template_query(path: str, body: Mapping[str, Any]) -> TokenQuery:
    """Return what is asked about messages.

    Raises:
        RequestError: there are none, or it asks for another rendering than a request would get.
    """
    if body.get("messages") is None and body.get("input") is None:
        needed = "messages" if path == APPLY_TEMPLATE else "content, prompt or messages"
        raise RequestError(f"{path} needs {needed}.", code="missing_field", param="messages")
    if body.get("chat_template") is not None:
        fields.refuse("chat_template", body["chat_template"], "none: the model's own is used")
    tells = "text" if path == APPLY_TEMPLATE else _told(body)
    has_header = fields.boolean(body, "add_generation_prompt", default=True)
    continues = fields.boolean(body, "continue_final_message")  # its header is the last message's
    return TokenQuery(tells, adds_header=has_header or continues)


def answer_size(counted: Counted) -> int:
    """Return about how many bytes of a body are as much work as `answer` is."""
    return len(counted.ids) * (_PIECE_WEIGHT if counted.piece_ends else 1) + len(counted.text)


def answer(
    path: str, body: Mapping[str, Any], counted: Counted, context_tokens: int | None
) -> bytes:
    """Return the JSON that the client is answered. Any thread."""
    if path == DETOKENIZE:
        return orjson.dumps({"content": counted.text, "prompt": counted.text})
    if path == APPLY_TEMPLATE:
        return orjson.dumps({"prompt": counted.text})
    ids = _numbers(counted.ids)
    row: dict[str, Any] = {
        "count": counted.tokens,
        "max_model_len": context_tokens,
        "tokens": ids,
        "token_strs": None,
    }
    if fields.boolean(body, "with_pieces"):
        named = zip(ids, _pieces(counted), strict=True)
        row["tokens"] = [{"id": each, "piece": _shown(piece)} for each, piece in named]
    if fields.boolean(body, "return_token_strs"):
        row["token_strs"] = [piece.decode("utf-8", "replace") for piece in _pieces(counted)]
    return orjson.dumps(row)


def _told(body: Mapping[str, Any]) -> str:
    wants = [fields.boolean(body, name) for name in ("with_pieces", "return_token_strs")]
    return "pieces" if any(wants) else "ids"


def _numbers(packed: bytes) -> list[int]:
    numbers = array("I", packed)
    assert numbers.itemsize == 4, "C's int is as long on every machine that MLX runs on"
    return numbers.tolist()


def _pieces(counted: Counted) -> Iterator[bytes]:
    ends = _numbers(counted.piece_ends)
    return (counted.pieces[start:end] for start, end in itertools.pairwise([0, *ends]))


def _shown(piece: bytes) -> str | list[int]:
    """Return a token's text; the bytes of one that is a part of a character, as llama.cpp does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
