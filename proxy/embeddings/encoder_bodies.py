"""Reads the bodies of /v1/embeddings and /v1/rerank into our own types."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from hearth.proxy.api.body.field_readers import Body, boolean, integer, refuse, rows, text
from hearth.shared.errors import RequestError

TEXTS_MAX: Final = 2_048  # of one request, as OpenAI has it
DIMENSIONS_MAX: Final = 65_536
TOKEN_ID_MAX: Final = 2**31 - 1

EmbeddingInput = str | list[int]  # a text, or the token ids of one
Encoding = Literal["float", "base64"]


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """What a request to embed asks for."""

    texts: list[EmbeddingInput]
    dimensions: int | None
    encoding: Encoding
    truncate: bool  # what is too long is cut; else it is refused


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """What a request to rank asks for."""

    query: str
    documents: list[str]
    results_max: int
    return_documents: bool


def read_embedding(body: Body) -> EmbeddingRequest:
    """Return what an OpenAI body asks for. Raises: RequestError."""
    encoding = text(body, "encoding_format") or "float"
    if encoding not in ("float", "base64"):
        refuse("encoding_format", encoding, "float or base64")
    return EmbeddingRequest(
        texts=read_texts(body.get("input"), "input"),
        dimensions=integer(body, "dimensions", 1, DIMENSIONS_MAX),
        encoding="base64" if encoding == "base64" else "float",
        truncate=boolean(body, "truncate"),
    )


def read_rerank(body: Body) -> RerankRequest:
    """Return what a body of Cohere's or Jina's shape asks for. Raises: RequestError."""
    query = text(body, "query")
    if not query:
        refuse("query", query, "a string that is not empty")
    given = rows(body.get("documents"), "documents")
    _check_count(given, "documents")
    documents = [_document(row, index) for index, row in enumerate(given)]
    top = integer(body, "top_n", 1, 2**31)
    return RerankRequest(
        query=query,
        documents=documents,
        results_max=len(documents) if top is None else min(top, len(documents)),
        return_documents=boolean(body, "return_documents"),
    )


def read_texts(given: Any, param: str) -> list[EmbeddingInput]:
    """Return the inputs: of one text, of the token ids of one, or of a list of either."""
    if type(given) is str or (type(given) is list and given and type(given[0]) is int):
        return [_text(given, param)]
    if type(given) is not list:
        refuse(param, given, "a string, or a list of strings or of token ids")
    _check_count(given, param)
    return [_text(row, f"{param}[{index}]") for index, row in enumerate(given)]


def _text(value: Any, param: str) -> EmbeddingInput:
    if type(value) is str and value:
        return value
    if (
        type(value) is list
        and value
        and all(type(one) is int and 0 <= one <= TOKEN_ID_MAX for one in value)
    ):
        return value
    refuse(param, value, "a string that is not empty, or a list of token ids")


def _document(row: Any, index: int) -> str:
    value = row.get("text") if type(row) is dict else row
    if type(value) is not str or not value:
        refuse(f"documents[{index}]", row, 'a string that is not empty, or {"text": one}')
    return value


def _check_count(given: list[Any], param: str) -> None:
    if not 1 <= len(given) <= TEXTS_MAX:
        remedy = "Send more requests with fewer each." if given else "Send at least one."
        raise RequestError(
            f"{param} has {len(given):,} texts and this server accepts 1 to {TEXTS_MAX:,} in one "
            f"request. {remedy}",
            param=param,
        )
