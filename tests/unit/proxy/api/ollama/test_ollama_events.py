"""Our events become Ollama's answers, whole or line by line."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.answer_frames import frames
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.api.ollama import generate_context, ollama_events
from hearth.proxy.api.ollama.ollama_request import parse_chat, parse_generate
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Delta, Finished, TokenLogprob, Usage
from tests.helpers.clients.api_events import Given, Scripted, called, done, more, said, thought

CHAT = parse_chat({"model": "M:latest", "messages": [{"role": "user", "content": "hi"}]})
GENERATE = parse_generate({"model": "m", "prompt": "hi"})
BROKEN = RequestError("The worker died.", status=503, code="worker_lost")


def lines(request: ParsedRequest, *given: Given) -> list[dict[str, Any]]:
    answer = Scripted(*given)
    admitted = AdmittedRequest(request, "m", answer)

    async def collect() -> list[bytes]:
        return [row async for row in frames(admitted, ollama_events.OllamaWriter(admitted))]

    rows = asyncio.run(collect())
    assert set(answer.waits) == {sse.PING_S}, "a silence goes unseen"
    assert all(row.endswith(b"\n") and row.count(b"\n") == 1 for row in rows)
    return [orjson.loads(row) for row in rows]


def whole(request: ParsedRequest, *given: Given, before_s: float = 0.0) -> dict[str, Any]:
    answer = Scripted(*given)
    admitted = AdmittedRequest(request, "m", answer, came_at=awake_s() - before_s)
    read: dict[str, Any] = orjson.loads(orjson.dumps(asyncio.run(ollama_events.whole(admitted))))
    return read


def test_a_chat_comes_line_by_line_and_its_last_one_has_the_figures() -> None:
    first, second, last = lines(CHAT, thought("t"), said("hi"), done())
    assert first["message"] == {"role": "assistant", "content": "", "thinking": "t"}
    assert second["message"] == {"role": "assistant", "content": "hi"}
    assert last["message"] == {"role": "assistant", "content": ""}
    assert [row["done"] for row in (first, second, last)] == [False, False, True]
    assert {row["model"] for row in (first, second, last)} == {"M:latest"}, "as it was asked for"
    assert (last["prompt_eval_count"], last["eval_count"]) == (10, 3)
    assert last["done_reason"] == "stop"
    made = datetime.fromisoformat(first["created_at"])
    assert abs(datetime.now(UTC) - made) < timedelta(minutes=5)


def test_a_prompts_answer_has_its_context_behind_it() -> None:
    first, last = lines(GENERATE, said("yes"), done())
    assert (first["response"], last["response"]) == ("yes", "")
    assert "context" not in first
    assert generate_context.messages_of(last["context"]) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    raw = parse_generate({"prompt": "hi", "raw": True})
    assert "context" not in whole(raw, said("yes"), done()), "there is no conversation"


def test_a_conversation_too_long_for_a_context_has_none() -> None:
    long = parse_generate({"prompt": "x" * generate_context.BYTES_MAX})
    assert whole(long, said("yes"), done())["context"] == []


def test_each_call_is_told_once_it_is_whole_with_its_arguments_as_an_object() -> None:
    given = (called("a", "f", '{"x"'), more(": 1}"), called("b", "g"), done("tool_calls"))
    first, second, last = lines(CHAT, *given)
    calls = [*first["message"]["tool_calls"], *second["message"]["tool_calls"]]
    assert calls == [
        {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": 1}}},
        {"id": "b", "function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    assert last["done_reason"] == "stop", "Ollama has no other word for it"
    assert whole(CHAT, *given)["message"]["tool_calls"] == calls


def test_the_digits_of_arguments_are_those_that_were_written() -> None:
    written = '{"a": 18446744073709551616, "b": 6.02214076e23, "c": 0.10000000000000000555}'
    given = Scripted(called("a", "f", written), done("tool_calls"))
    told = asyncio.run(ollama_events.whole(AdmittedRequest(CHAT, "m", given)))
    assert written.encode() in orjson.dumps(told)


def test_a_call_that_was_cut_off_is_left_out() -> None:
    told = whole(CHAT, said("a"), called("a", "f", '{"x": '), done("length"))
    assert told["message"] == {"role": "assistant", "content": "a"}
    assert told["done_reason"] == "length"


def test_a_silent_stream_sends_an_empty_part() -> None:
    first, last = lines(CHAT, None, done())
    assert first["message"] == {"role": "assistant", "content": ""}
    assert not first["done"] and last["done"]


def test_what_breaks_off_ends_in_an_error() -> None:
    assert lines(CHAT, said("a"), BROKEN)[-1] == {"error": "The worker died."}
    with pytest.raises(RequestError, match="died"):
        whole(CHAT, said("a"), BROKEN)


def test_durations_add_up_to_all_the_time_since_the_request_came() -> None:
    usage = Usage(10, 4, 6, 5, ttft_ms=300, finish_ms=800, queue_ms=100)
    told = whole(CHAT, said("a"), Finished("r", "stop", None, usage), before_s=2.0)
    assert told["prompt_eval_duration"] == 200_000_000
    assert told["eval_duration"] == 500_000_000
    assert 2_000_000_000 <= told["total_duration"] < 60_000_000_000
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(told[name] for name in parts) == told["total_duration"]


def test_nothing_took_no_time_since_clients_divide_by_it() -> None:
    told = whole(CHAT, said("a"), Finished("r", "stop", None, Usage(1, 0, 1, 1)))
    assert told["prompt_eval_duration"] == told["eval_duration"] == 1_000_000
    assert told["load_duration"] >= 0


def test_log_probabilities_have_ollamas_names() -> None:
    row = TokenLogprob(7, "a", b"a", -0.5, [[7, "a", b"a", -0.5], [8, "b", b"b", float("-inf")]])
    told = whole(CHAT, Delta("r", 0, "content", "a", [row]), done())
    (shown,) = told["logprobs"]
    assert (shown["token"], shown["logprob"], shown["bytes"]) == ("a", -0.5, [97])
    assert [each["token"] for each in shown["top_logprobs"]] == ["a", "b"]
    assert shown["top_logprobs"][1]["logprob"] == -9999.0


def test_a_request_that_asks_nothing_is_answered_whole() -> None:
    told = ollama_events.empty_answer("ollama_chat", "m", "load")
    assert told["message"] == {"role": "assistant", "content": ""}
    assert told["done"] and told["done_reason"] == "load"
    assert ollama_events.empty_answer("ollama_generate", "m", "unload")["response"] == ""
