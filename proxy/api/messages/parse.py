"""Turns the body of an Anthropic Messages request into our request."""

import dataclasses
from typing import Any

from hearth.proxy.api.body import field_readers as fields, sampling_params, thinking_options
from hearth.proxy.api.body.message_content import ends_open
from hearth.proxy.api.messages.content_blocks import MessagesReader
from hearth.proxy.api.messages.errors import THREAD_UNSUPPORTED
from hearth.proxy.api.messages.tools import MessagesTools, read_choice, read_tools
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Prompt


def parse(body: dict[str, Any]) -> ParsedRequest:
    """Return the request in `body`.

    Raises:
        RequestError: a field is not what the API allows, or needs what this server lacks.
    """
    if body.get("thread") is not None:
        # We would have to hold the conversation: passed over, it would lose its history. At this
        # code the SDK sends the whole from then on.
        raise RequestError(
            "thread is not supported; send the whole conversation in messages.",
            code=THREAD_UNSUPPORTED,
            param="thread",
        )
    found = read_tools(body)
    conversation = _conversation(body, found)
    template_kwargs, thinking = thinking_options.read(body)
    limit = sampling_params.read_max_tokens(body, "max_tokens", low=0)
    return ParsedRequest(
        dialect="messages",
        model=str(body.get("model") or ""),
        prompt=Prompt(
            conversation.messages,
            found.shown,
            template_kwargs,
            found.deferred,
            continues=ends_open(conversation.messages),
            thinking=thinking,
        ),
        sampling=sampling_params.read_sampling(
            body, max_tokens=limit or None, stop="stop_sequences"
        ),
        stream=fields.boolean(body, "stream"),
        body=body,
        left_out=(*found.dropped, *conversation.left_out),
        constraints=dataclasses.replace(
            read_choice(body, found), **_format(body), thinking_budget=thinking.budget
        ),
        prefill_only=limit == 0,
    )


def _format(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Constraints that ask for a JSON schema, by its name or the beta's."""
    config = fields.optional_record(body, "output_config")
    for value, param in (
        (config.get("format"), "output_config.format"),
        (body.get("output_format"), "output_format"),
    ):
        if value is not None:
            shape = fields.record(value, param)
            if shape.get("type") != "json_schema":
                fields.refuse(f"{param}.type", shape.get("type"), "json_schema")
            return {
                "is_json": True,
                "schema": fields.record(shape.get("schema"), f"{param}.schema"),
            }
    return {}


def _conversation(body: dict[str, Any], found: MessagesTools) -> MessagesReader:
    given = fields.rows(body.get("messages"), "messages")
    if not given:
        raise RequestError(
            "messages is empty; send at least one message.", code="empty_messages", param="messages"
        )
    conversation = MessagesReader(found)
    conversation.read_system(body.get("system"))
    for index, value in enumerate(given):
        conversation.read(value, f"messages[{index}]")
    return conversation
