"""Reads streams of Hearth's with the official SDKs' real clients, without a network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import orjson
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

_TYPE = {"content-type": "text/event-stream"}
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class AnthropicReader:
    """One client; each stream is given as its frames."""

    def __init__(self) -> None:
        self._content = b""
        transport = httpx2.MockTransport(
            lambda _: httpx2.Response(200, headers=_TYPE, content=self._content)
        )
        self._client = anthropic.Anthropic(
            base_url="http://test", api_key="k", http_client=httpx2.Client(transport=transport)
        )

    def message(self, frames: Sequence[bytes]) -> dict[str, Any]:
        """Return the message that the SDK adds the stream up to."""
        self._content = b"".join(frames)
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        with self._client.beta.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
            return stream.get_final_message().to_dict()


@dataclass
class Read:
    """What a stream of a response adds up to."""

    kinds: list[str] = field(default_factory=list)  # of events
    snapshots: dict[int, str] = field(default_factory=dict)  # the SDK's, by place in the output
    final: dict[str, Any] = field(default_factory=dict)  # the response in the last event


class OpenAIReader:
    """One client; each stream is given as its frames."""

    def __init__(self) -> None:
        self._content = b""
        transport = httpx.MockTransport(
            lambda _: httpx.Response(200, headers=_TYPE, content=self._content)
        )
        self._client = openai.OpenAI(
            base_url="http://test", api_key="k", http_client=httpx.Client(transport=transport)
        )

    def response(self, frames: Sequence[bytes]) -> Read:
        """Return what the SDK adds the stream up to; every event is one that it declares."""
        self._content = b"".join(frames)
        read = Read()
        with self._client.responses.stream(model="m", input="hi") as stream:
            for event in stream:
                read.kinds.append(event.type)
                if snapshot := getattr(event, "snapshot", None):
                    read.snapshots[getattr(event, "output_index")] = snapshot  # noqa: B009
        for frame in frames:
            row = orjson.loads(frame.split(b"data: ")[1])
            _EVENT.validate_python(row)
            read.final = row.get("response", read.final)
        return read
