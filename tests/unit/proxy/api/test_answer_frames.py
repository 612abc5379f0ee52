"""Several answers come as one stream, end together, and cost their prompt once."""

import asyncio
import dataclasses
import gc
import json
from collections.abc import Sequence
from typing import Any, cast

import orjson
import pytest

from hearth.proxy.api.answer_frames import AdmittedRequest, choice_events, frames, total_usage
from hearth.proxy.api.chat_completions.events import ChatWriter
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError, WorkerLost
from hearth.shared.wire_messages import Usage
from tests.helpers.clients.api_events import Given, Scripted, done, said
from tests.helpers.proxy.app_over_workers import front
from tests.helpers.proxy.read_bodies import read as parsed
from tests.helpers.proxy.virtual_time import run_in_virtual_time


def ticket(request: ParsedRequest, *scripts: Sequence[Given]) -> AdmittedRequest:
    """Return the ticket of `request` whose choices play the scripts."""
    answers: Any = [Scripted(*steps) for steps in scripts]
    return AdmittedRequest(request, "m", answers[0], tuple(answers[1:]))


async def listed(iterator: Any) -> list[Any]:
    return [row async for row in iterator]


def made(*scripts: Sequence[Given]) -> AdmittedRequest:
    body = {"messages": [{"role": "user", "content": "x"}], "n": len(scripts)}
    return ticket(DIALECTS["chat"].parse(body), *scripts)


def read(given: AdmittedRequest, wait_s: float | None = None) -> list[Any]:
    found: list[Any] = run_in_virtual_time(listed(choice_events(given, wait_s)))
    return found


def chunks(given: AdmittedRequest) -> list[Any]:
    """Return the chunks of a stream that ends well."""
    writer = DIALECTS[given.request.dialect].writer(given)
    *rows, _ = run_in_virtual_time(listed(frames(given, writer)))
    return [json.loads(row.removeprefix(b"data: ")) for row in rows]


def whole(given: AdmittedRequest) -> Any:
    async def told() -> Any:
        return await DIALECTS[given.request.dialect].whole(given)

    return run_in_virtual_time(told())


def test_each_choice_keeps_its_own_order_and_ends_once() -> None:
    given = made([said("a"), 0.03, said("b"), done()], [0.01, said("c"), done("length")])
    rows = read(given)
    assert [row for index, row in rows if index == 0] == [said("a"), said("b"), done()]
    assert [row for index, row in rows if index == 1] == [said("c"), done("length")]
    assert rows.index((1, said("c"))) < rows.index((0, said("b")))  # nobody waits for another


def test_a_silence_of_all_is_told_and_one_of_some_is_not() -> None:
    rows = read(made([0.25, said("a"), done()], [0.25, said("b"), done()]), wait_s=0.1)
    assert rows.count((0, None)) == 2
    talking = [step for _ in range(5) for step in (0.05, said("b"))]
    rows = read(made([0.25, said("a"), done()], [*talking, done()]), wait_s=0.15)
    assert (0, None) not in rows


@pytest.mark.process
@pytest.mark.parametrize("streams", [True, False])
async def test_where_one_fails_the_worker_is_told_to_stop_the_others(streams: bool) -> None:
    async with front(1) as made:
        prompts = ["n=200 delay=0.05", "n=9 fail=2"]
        asked = {"model": "smollm2", "prompt": prompts, "stream": streams}
        await made.ask("POST", "/v1/completions", body=orjson.dumps(asked))
        await made.made.until(lambda: made.made.events("Cancel"))


def test_a_failure_of_one_ends_all_before_anybody_reads_of_it() -> None:
    with pytest.raises(WorkerLost):
        read(made([said("a"), 9.0, done()], [0.01, WorkerLost("gone")], [WorkerLost("gone too")]))

    async def read_to_the_error() -> bool:
        given = made([said("a"), 9.0], [0.001, RequestError("late")])
        told = frames(given, ChatWriter(given))
        while b'"error"' not in await anext(told):
            pass
        return all(cast(Scripted, answer).is_closed for answer in given.answers)

    assert asyncio.run(read_to_the_error())


def test_nothing_is_left_running_when_the_reader_stops(caplog: Any) -> None:
    given = made([said("a"), 9.0], [0.001, RequestError("late")])

    async def stop_early() -> int:
        events = choice_events(given)
        await anext(events)
        await asyncio.sleep(0.01)
        await events.aclose()
        return len(asyncio.all_tasks())

    assert asyncio.run(stop_early()) == 1
    gc.collect()
    assert not caplog.records  # no task's exception went unread


def test_a_prompt_is_counted_once_for_all_its_choices() -> None:
    usages = [Usage(10, 4, 6, 3, 1, "ram"), Usage(10, 9, 1, 5, 2, "slot")]
    for number, row in enumerate(usages):
        drafted = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 5 * number}
        usages[number] = dataclasses.replace(row, **drafted, decode_forwards=2 + number)
    told = total_usage(usages, per_prompt=2)
    assert (told.prompt_tokens, told.cached_tokens, told.prefilled_tokens) == (10, 4, 6)
    assert (told.completion_tokens, told.reasoning_tokens, told.source) == (8, 3, "ram")
    drafted = (told.accepted_prediction_tokens, told.rejected_prediction_tokens)
    assert (drafted, told.decode_forwards) == ((2, 5), 5)


# ---------------------------------------------------------------- as clients are told


def test_the_last_delta_of_all_tells_the_cache_once() -> None:
    rows = [
        row["choices"][0]
        for row in chunks(made([said("a"), done(source="ram")], [0.1, said("b"), done()]))
    ]
    told = [row for row in rows if "provider_specific_fields" in row["delta"]]
    assert told == [rows[-2]], "when all of them have ended"
    assert rows[-2]["index"] == rows[-1]["index"] == 1
    assert rows[-2]["delta"]["provider_specific_fields"]["kv_cache"]["source"] == "ram"


def test_every_prompt_and_choice_of_a_completion_is_counted() -> None:
    scripts = [[said("a"), said("b"), done()]] + [[said("c"), done("length")]] * 3
    answer = whole(ticket(parsed("completions", prompt=["x", "y"], n=2), *scripts))
    choices = [(row["index"], row["text"], row["finish_reason"]) for row in answer["choices"]]
    cut = [(index, "c", "length") for index in (1, 2, 3)]
    assert choices == [(0, "ab", "stop"), *cut]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 12)


@pytest.mark.parametrize("field", ["max_tokens", "n_predict"])
def test_a_limit_of_no_tokens_was_refused_and_echoes_each_prompt(field: str) -> None:
    request = parsed("completions", prompt=["a", "b"], n=2, echo=True, **{field: 0})
    ends = [[done("prefilled")] for _ in range(4)]
    choices = whole(ticket(request, *ends))["choices"]
    wanted = [(text, "length") for text in "aabb"]
    assert [(row["text"], row["finish_reason"]) for row in choices] == wanted
    told = [row for chunk in chunks(ticket(request, *ends)) for row in chunk["choices"]]
    for index, (text, reason) in enumerate(wanted):
        own = [row for row in told if row["index"] == index]
        assert "".join(row["text"] for row in own) == text
        assert [row["finish_reason"] for row in own if row["finish_reason"]] == [reason]
