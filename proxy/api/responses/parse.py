"""Turns the body of an OpenAI Responses request into our request."""

import dataclasses
from typing import Any, Final

from hearth.proxy.api.body import (
    field_readers as fields,
    sampling_params,
    thinking_options,
    tool_definitions as tools,
)
from hearth.proxy.api.body.response_format import read_format
from hearth.proxy.api.responses.input_items import InputItemReader
from hearth.proxy.api.responses.tools import ResponsesTools, responses_tools_of
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt

LOGPROBS: Final = "message.output_text.logprobs"  # in `include`


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`, whose `previous_response_id` is already part of its input.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    _refuse_unsupported(body)
    request_tools = responses_tools_of(body)
    items = _read_items(body, request_tools)
    template_kwargs, thinking = thinking_options.read(body)
    limit = sampling_params.read_max_tokens(body, "max_output_tokens")
    return ParsedRequest(
        dialect="responses",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            *(items.messages, request_tools.shown, template_kwargs, request_tools.deferred),
            thinking=thinking,
        ),
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit, stop="stop", top_logprobs=_top_logprobs(body)
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        left_out=(*request_tools.dropped, *items.left_out),
        constraints=dataclasses.replace(
            tools.openai_choice(
                body.get("tool_choice"), request_tools.choosable, request_tools.dropped
            ),
            **read_format(fields.optional_record(body, "text").get("format"), "text.format"),
            parallel_calls=fields.boolean(body, "parallel_tool_calls", default=True),
            thinking_budget=thinking.budget,
        ),
    )


def _top_logprobs(body: dict[str, Any]) -> int | None:
    """Return how many alternatives of each token are wanted; None where no log probability is."""
    count = fields.integer(body, "top_logprobs", 0, sampling_params.TOP_LOGPROBS_MAX)
    return (count or 0) if LOGPROBS in fields.optional_rows(body, "include") else None


def _refuse_unsupported(body: dict[str, Any]) -> None:
    if body.get("conversation") is not None:
        raise RequestError(
            "conversation is not supported; name the last response in previous_response_id, or "
            "send the whole conversation in input.",
            code="unsupported_parameter",
            param="conversation",
        )
    if fields.boolean(body, "background"):
        raise RequestError(
            "background is not supported: a response is made while its client waits. Leave it out, "
            "or send false.",
            code="unsupported_parameter",
            param="background",
        )
    for name in ("reasoning", "metadata"):  # the answer repeats them
        fields.optional_record(body, name)


def _read_items(body: dict[str, Any], request_tools: ResponsesTools) -> InputItemReader:
    items = InputItemReader(request_tools)
    if instructions := fields.text(body, "instructions"):
        items.messages.append({"role": "system", "content": instructions})
    rows = input_items(body)
    for row, param in fields.records(rows, "input"):
        items.read(row, param)
    items.flush_reasoning()
    if not rows:
        raise RequestError(
            "input is empty; send at least one item.", code="empty_messages", param="input"
        )
    return items


def input_items(body: dict[str, Any]) -> list[Any]:
    """Return the input as a list of items: a string is what a user says.

    Raises:
        RequestError: it is neither a string nor a list.
    """
    given = body.get("input")
    if type(given) is str:
        return [{"type": "message", "role": "user", "content": given}] if given else []
    if type(given) is not list:
        fields.refuse("input", given, "a string or a list of items")
    return given
