"""Writes answers as OpenAI's chat, completions and embeddings do, whole and as a stream."""

import base64
import hashlib
import json
import re
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.helpers.cloud.cloud_answers import CloudAnswer
from tests.helpers.cloud.cloud_memory import CloudMemory, CloudUsage, new_id, tokens

DIMENSIONS: Final = 8
DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class CloudReply:
    """One answer in both forms; the request says which is sent."""

    whole: dict[str, Any]
    events: tuple[bytes, ...] = ()
    usage: CloudUsage = CloudUsage(0, 0, 0)


def pieces(text: str) -> list[str]:
    """Return `text` in words, each with the white space behind it."""
    return re.findall(r"\S+\s*|\s+", text)


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chat_usage(usage: CloudUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning, "audio_tokens": 0},
    }


def written(answer: CloudAnswer) -> str:
    """Return all that counts as output, without thinking."""
    return answer.text + "".join(json.dumps(dict(call.arguments)) for call in answer.calls)


# ---------------------------------------------------------------- chat


def chat_reply(body: Mapping[str, Any], answer: CloudAnswer, memory: CloudMemory) -> CloudReply:
    units = [body.get("tools"), *body["messages"]]
    usage = memory.usage(body["model"], units, written(answer), answer.thinking)
    base = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": body["model"]}
    base |= {"system_fingerprint": "fp_mock", "service_tier": "default"}
    message = _chat_message(answer)
    finish = answer.finish or ("tool_calls" if answer.calls else "stop")
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if body.get("logprobs"):
        choice["logprobs"] = _logprobs(pieces(answer.text), body.get("top_logprobs") or 0)
    choices = [{**choice, "index": index} for index in range(body.get("n") or 1)]
    whole = {**base, "object": "chat.completion", "choices": choices, "usage": chat_usage(usage)}
    events = tuple(_chat_events(body, answer, base | {"object": "chat.completion.chunk"}, whole))
    return CloudReply(whole, events, usage)


def _chat_message(answer: CloudAnswer) -> dict[str, Any]:
    calls = [
        {
            "id": new_id("call_"),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for call in answer.calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None, "refusal": None}
    message["annotations"] = []
    if answer.shows_thinking and answer.thinking:
        message["reasoning_content"] = answer.thinking
    return message | ({"tool_calls": calls} if calls else {})


def _chat_events(
    body: Mapping[str, Any], answer: CloudAnswer, base: dict[str, Any], whole: dict[str, Any]
) -> Iterator[bytes]:
    wants_usage = (body.get("stream_options") or {}).get("include_usage")
    more = {"usage": None} if wants_usage else {}

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
        row = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return data({**base, **more, "choices": [row]})

    choice = whole["choices"][0]
    message = choice["message"]
    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for piece in pieces(message.get("reasoning_content", "")):
        yield chunk({"reasoning_content": piece})
    for piece in pieces(answer.text):
        wants = body.get("logprobs")
        logprobs = _logprobs([piece], body.get("top_logprobs") or 0) if wants else None
        yield chunk({"content": piece}, logprobs=logprobs)
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        head = call | {"index": index, "function": {"name": function["name"], "arguments": ""}}
        yield chunk({"tool_calls": [head]})
        for piece in pieces(function["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, choice["finish_reason"])
    if wants_usage:
        yield data({**base, "choices": [], "usage": whole["usage"]})
    yield DONE


def _logprobs(words: list[str], top: int) -> dict[str, Any]:
    rows = []
    for word in words:
        row = {"token": word, "logprob": -0.5, "bytes": list(word.encode())}
        rows.append(row | {"top_logprobs": [row] * top})
    return {"content": rows, "refusal": None}


# ---------------------------------------------------------------- completions


def completions_reply(
    body: Mapping[str, Any], answer: CloudAnswer, memory: CloudMemory
) -> CloudReply:
    usage = memory.usage(body["model"], [body["prompt"]], answer.text, "")
    base = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
    base["model"] = body["model"]
    finish = answer.finish or "stop"

    def choice(text: str, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}

    told = chat_usage(usage)
    whole = {**base, "choices": [choice(answer.text, finish)], "usage": told}
    events = [data({**base, "choices": [choice(piece, None)]}) for piece in pieces(answer.text)]
    events.append(data({**base, "choices": [choice("", finish)]}))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(data({**base, "choices": [], "usage": told}))
    return CloudReply(whole, (*events, DONE), usage)


# ---------------------------------------------------------------- embeddings


def embeddings_reply(body: Mapping[str, Any]) -> CloudReply:
    given = body["input"]
    is_one = isinstance(given, str) or isinstance(given[0], int)
    texts = [given] if is_one else list(given)
    size = body.get("dimensions") or DIMENSIONS
    rows = []
    for index, text in enumerate(texts):
        vector: Any = embedding(str(text), size)
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
        rows.append({"object": "embedding", "index": index, "embedding": vector})
    count = sum(tokens(str(text)) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    whole = {"object": "list", "data": rows, "model": body["model"], "usage": usage}
    return CloudReply(whole, (), CloudUsage(count, 0, 0))


def embedding(text: str, size: int = DIMENSIONS) -> list[float]:
    """Return a vector that is the same for the same text; its numbers are exact in float32."""
    digest = hashlib.shake_128(text.encode()).digest(size)
    return [byte / 256 for byte in digest]
