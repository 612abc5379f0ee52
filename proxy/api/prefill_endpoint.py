"""Serves `POST /v1/cache/prefill`, which prefills a prompt of any dialect ahead of its request."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, cast, get_args

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import Dialect, ParsedRequest
from hearth.shared.wire_messages import Finished

PATH: Final = "/v1/cache/prefill"
_DIALECTS: Final = get_args(Dialect)


def dialect_of(
    body: Mapping[str, Any], headers: Mapping[str, str], query: Mapping[str, str]
) -> Dialect:
    """Return the dialect that the query names, or else the one whose fields are in `body`.

    Raises:
        RequestError: the query names no known dialect.
    """
    if (wanted := query.get("dialect")) is not None:
        if wanted not in _DIALECTS:
            fields.refuse("dialect", wanted, ", ".join(_DIALECTS))
        return cast(Dialect, wanted)
    if "input" in body or "previous_response_id" in body:
        return "responses"
    if "prompt" in body and "messages" not in body:
        return "completions"
    tools = body.get("tools")
    has_schemas = type(tools) is list and any(
        type(tool) is dict and "input_schema" in tool for tool in tools
    )
    is_anthropic = "anthropic-version" in headers or "system" in body or has_schemas
    return "messages" if is_anthropic else "chat"


def prefill_request(request: ParsedRequest) -> ParsedRequest:
    """Return the request that makes a worker prefill the prompt of `request` and keep its KV.

    Raises:
        RequestError: the body turns the cache off, or has several prompts.
    """
    body = request.body
    if body.get("use_kv_cache") is False:
        fields.refuse("use_kv_cache", False, "true for a prompt that is to be kept")
    if request.more_prompts:
        count = 1 + len(request.more_prompts)
        fields.refuse("prompt", f"a list of {count}", "one prompt; send each in its own request")
    return dataclasses.replace(
        request,
        choices=1,
        use_kv_cache=True,
        prefill_only=True,
        pin=fields.boolean(body, "pin"),
        prediction="",  # there is no answer to draft
    )


async def prefill_result(
    answer: AnswerStream, request: ParsedRequest, model: str
) -> dict[str, Any]:
    """Return the body of the response, once the prompt is prefilled.

    Raises:
        RequestError: the prefill failed, or the pin was refused.
    """
    finished = await answer.next_event()
    assert isinstance(finished, Finished), "a prefill gave output before its end"
    usage = finished.usage
    return {
        "object": "cache.prefill",
        "id": answer.request_id,
        "model": model,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "prefilled_tokens": usage.prefilled_tokens,
        "source": usage.source,
        "ms": usage.finish_ms,
        "pinned": request.pin,
    }
