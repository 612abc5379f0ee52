"""Any answer, streamed: what the official SDKs add it up to is what the whole answer says."""

import asyncio
import dataclasses
import json
from typing import Any

from hypothesis import given, strategies as st

from hearth.proxy.api.answer_frames import AdmittedRequest, frames
from hearth.proxy.api.dialects import DIALECTS
from hearth.shared.wire_messages import CallStart, Delta, Finished, TokenLogprob, Usage
from tests.helpers.clients.api_events import SIGNATURE, Scripted, frames_of, whole_of
from tests.helpers.clients.sdk_readers import AnthropicReader, OpenAIReader

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAMES = ("plain", "patch", "files__read", "tool_search", "made_up")
FILES = {"type": "namespace", "name": "files", "description": "Of files."}
TOOLS = [
    {"type": "function", "name": "plain", "parameters": {"type": "object"}, "strict": False},
    {"type": "custom", "name": "patch"},
    FILES | {"tools": [{"type": "function", "name": "read"}]},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]
USAGE = Usage(10, 4, 6, 3, 1)


@st.composite
def deltas(draw: Any) -> list[Delta]:
    """Return an answer in pieces: speech and calls in any order, the last call maybe cut off."""
    rows: list[Delta] = []
    for turn in range(draw(st.integers(0, 5))):
        channel = draw(st.sampled_from(["reasoning", "content", "tool_call"]))
        if channel != "tool_call":
            rows += [Delta("r", 0, channel, piece) for piece in draw(st.lists(TEXT, max_size=4))]
            continue
        name = draw(st.sampled_from(NAMES))
        arguments = draw(st.dictionaries(TEXT, VALUES, max_size=3))
        written = {"input": draw(TEXT)} if name == "patch" else arguments
        pieces = pieces_of(draw, json.dumps(written, ensure_ascii=draw(st.booleans())))
        first = draw(st.booleans())
        start = CallStart(f"call{turn}", name)
        rows.append(Delta("r", 0, "tool_call", pieces.pop(0) if first else "", call=start))
        rows += [Delta("r", 0, "tool_call", piece) for piece in pieces]
    return rows


def pieces_of(draw: Any, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def with_silences(rows: list[Delta], reason: str) -> list[Any]:
    return [*(x for row in rows for x in (row, None)), Finished("r", reason, None, USAGE)]


anthropic_reader = AnthropicReader()
openai_reader = OpenAIReader()


@given(deltas(), st.booleans())
def test_a_streamed_message_is_the_whole_message(rows: list[Delta], hides: bool) -> None:
    thinking = {"type": "adaptive", "display": "omitted"} if hides else {"type": "adaptive"}
    body = {"messages": [{"role": "user", "content": "x"}], "thinking": thinking}
    request = DIALECTS["messages"].parse(body)
    reason = "tool_calls" if any(row.call for row in rows) else "stop"
    frames = frames_of(request, DIALECTS["messages"].writer, with_silences(rows, reason))
    whole = whole_of(request, [*rows, Finished("r", reason, None, USAGE)])
    told = anthropic_reader.message(frames)
    for block in told["content"]:
        block.pop("parsed_output", None)
    assert told["content"] == whole["content"]
    for name in ("id", "stop_reason", "stop_sequence", "role", "model"):
        assert told[name] == whole[name]
    for name in ("input_tokens", "output_tokens", "cache_read_input_tokens"):
        assert told["usage"][name] == whole["usage"][name]
    spoken = "".join(row.text for row in rows if row.channel == "content")
    assert "".join(b["text"] for b in told["content"] if b["type"] == "text") == spoken
    thoughts = [block for block in told["content"] if block["type"] == "thinking"]
    assert all(block["signature"] == SIGNATURE for block in thoughts)
    reasoned = "".join(row.text for row in rows if row.channel == "reasoning")
    assert "".join(block["thinking"] for block in thoughts) == ("" if hides else reasoned)
    calls = [
        (block["id"], block["name"]) for block in told["content"] if block["type"] == "tool_use"
    ]
    assert calls == [(row.call.id, row.call.name) for row in rows if row.call]


CHAT_TOOLS = [
    *({"type": "function", "function": {"name": name}} for name in ("plain", "tool_search")),
    {"type": "custom", "custom": {"name": "patch"}},
]
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": CHAT_TOOLS, "logprobs": True}


def with_logprobs(rows: list[Delta]) -> list[Delta]:
    """Return `rows` with a token's log probability in each that says something."""
    return [
        dataclasses.replace(row, logprobs=[TokenLogprob(at, row.text, b"", -1.0, [])])
        if row.channel == "content"
        else row
        for at, row in enumerate(rows)
    ]


def chat_of(answers: list[list[Any]], **fields: Any) -> AdmittedRequest:
    request = DIALECTS["chat"].parse(CHAT | {"n": len(answers)} | fields)
    first, *others = (Scripted(*rows) for rows in answers)
    return AdmittedRequest(request, "m", first, tuple(others))


def added_up(chunks: list[Any], index: int) -> dict[str, Any]:
    """Return a choice as the whole answer has it, from the chunks that tell of it."""
    own = [row for each in chunks for row in each["choices"] if row["index"] == index]
    assert [row["finish_reason"] for row in own[:-1]] == [None] * (len(own) - 1)
    assert own[0]["delta"] == {"role": "assistant", "content": ""}
    calls: list[Any] = []
    for piece in (call for row in own for call in row["delta"].get("tool_calls", ())):
        if piece["index"] == len(calls):
            calls.append({name: piece[name] for name in piece if name != "index"})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    content = "".join(row["delta"].get("content", "") for row in own)
    message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning := "".join(row["delta"].get("reasoning_content", "") for row in own):
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    logprobs = [told for row in own if "logprobs" in row for told in row["logprobs"]["content"]]
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": logprobs, "refusal": None},
        "finish_reason": own[-1]["finish_reason"],
    }


@given(st.lists(deltas().map(with_logprobs), min_size=1, max_size=3), st.booleans())
def test_the_chunks_of_a_chat_add_up_to_the_whole_completion(
    answers: list[list[Delta]], wants_usage: bool
) -> None:
    reasons = ["tool_calls" if any(row.call for row in rows) else "stop" for rows in answers]
    final = [Finished("r", reason, None, USAGE) for reason in reasons]
    streamed = [with_silences(rows, reason) for rows, reason in zip(answers, reasons, strict=True)]
    options = {"stream": True, "stream_options": {"include_usage": wants_usage}}

    async def collect() -> list[bytes]:
        asked = chat_of(streamed, **options)
        writer = DIALECTS["chat"].writer(asked)
        return [frame async for frame in frames(asked, writer)]

    *told, done = asyncio.run(collect())
    assert done == b"data: [DONE]\n\n"
    chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in told]
    given_whole = [[*rows, end] for rows, end in zip(answers, final, strict=True)]
    whole = asyncio.run(DIALECTS["chat"].whole(chat_of(given_whole)))
    assert [added_up(chunks, index) for index in range(len(answers))] == whole["choices"]
    told = [row["usage"] for row in chunks if "usage" in row]
    assert told == ([whole["usage"]] if wants_usage else [])
    for rows, choice in zip(answers, whole["choices"], strict=True):
        spoken = "".join(row.text for row in rows if row.channel == "content")
        assert (choice["message"]["content"] or "") == spoken


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in response.items() if k not in ("created_at", "completed_at")}


@given(deltas(), st.booleans())
def test_a_streamed_response_is_the_whole_response(rows: list[Delta], sums_up: bool) -> None:
    reasoning = {"effort": "low", "summary": "auto" if sums_up else None}
    request = DIALECTS["responses"].parse({"input": "x", "tools": TOOLS, "reasoning": reasoning})
    reason = "tool_calls" if any(row.call for row in rows) else "stop"
    frames = frames_of(request, DIALECTS["responses"].writer, with_silences(rows, reason))
    whole = whole_of(request, [*rows, Finished("r", reason, None, USAGE)])
    read = openai_reader.response(frames)
    assert read.kinds[:2] == ["response.created", "response.in_progress"]
    assert read.kinds[-1] == "response.completed"
    events = [json.loads(frame.split(b"data: ")[1]) for frame in frames]
    assert [row["sequence_number"] for row in events] == list(range(len(events)))
    assert without_times(events[-1]["response"]) == without_times(whole)
    check_items(events, whole["output"], read.snapshots)
    spoken = "".join(row.text for row in rows if row.channel == "content")
    told = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
    assert "".join(told) == spoken
    calls = [item["call_id"] for item in whole["output"] if "call_id" in item]
    assert calls == [row.call.id for row in rows if row.call]


def check_items(
    events: list[dict[str, Any]], output: list[dict[str, Any]], snapshots: dict[int, str]
) -> None:
    """Check that each item's own events add up to it, are in order, and tell of it alone."""
    for index, item in enumerate(output):
        own = [row for row in events if row.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1] == own[-1] | {"type": "response.output_item.done", "item": item}
        assert {row["item_id"] for row in own[1:-1]} <= {item["id"]}
        text = "".join(row["delta"] for row in own if row["type"].endswith(".delta"))
        assert text == text_of(item)
        if item["type"] in ("message", "function_call") and text:
            assert snapshots[index] == text


def text_of(item: dict[str, Any]) -> str:
    """Return what the deltas of an item add up to."""
    if item["type"] in ("message", "reasoning"):
        parts = item.get("summary") or item["content"]
        return str(parts[0]["text"])
    if item["type"] == "tool_search_call":
        return ""
    return str(item["input" if item["type"] == "custom_tool_call" else "arguments"])
