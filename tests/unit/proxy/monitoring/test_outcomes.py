"""Checks the outcome of a request whose answer and reply end differently, or whose client left."""

import asyncio
import dataclasses
from typing import Any
from unittest import mock

import orjson
import pytest

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.app import ProxyApp
from hearth.proxy.pool import worker_link
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Admitted, Cancel, Failed, Finished, Speaker, Usage
from tests.helpers.clients.scraped_metrics import total
from tests.helpers.proxy.app_over_workers import KEY, Front, front
from tests.helpers.proxy.feed_events import read, read_until
from tests.helpers.proxy.metric_values import ASKED, USAGE, value, values
from tests.helpers.proxy.proxy_app import app_of, asked

RESPONSES = "/v1/responses"


def outcomes(edge: ProxyApp, dialect: str) -> dict[str, float]:
    told = values(edge.metrics)
    return {
        dict(labels)["outcome"]: count
        for (name, labels), count in told.items()
        if name == "hearth_requests_total" and dict(labels)["dialect"] == dialect and count
    }


def last_row(edge: ProxyApp) -> dict[str, Any]:
    row: dict[str, Any] = edge.routes.requests.of("").rows[-1]
    return row


async def post(made: Front, script: str, **fields: Any) -> int:
    content = orjson.dumps({"model": "smollm2", "input": script, **fields})
    return (await made.ask("POST", RESPONSES, body=content)).status


# ---------------------------------------------------------------- the reply breaks, not the answer


@pytest.mark.process
@pytest.mark.parametrize("error", [RuntimeError("a bug"), RequestError("No.", status=500)])
async def test_a_reply_that_fails_after_its_answers_end_has_failed(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    api = DIALECTS["responses"]

    async def breaks(ticket: Any) -> Any:
        await api.whole(ticket)
        raise error

    async with front(1) as made:
        monkeypatch.setitem(DIALECTS, "responses", dataclasses.replace(api, whole=breaks))
        assert await post(made, "n=1") == 500
        assert outcomes(made.app, "responses") == {"failed": 1}
        assert last_row(made.app)["ended"] == "internal_error"
        assert value(made.app.metrics, "client_disconnects_total") == 0


@pytest.mark.process
async def test_a_client_that_leaves_between_the_answers_end_and_its_reply_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = DIALECTS["responses"]

    async with front(1) as made:
        gone = asyncio.Event()

        async def leaves(ticket: Any) -> Any:
            told = await api.whole(ticket)
            gone.set()
            await asyncio.sleep(0.01)
            return told

        monkeypatch.setitem(DIALECTS, "responses", dataclasses.replace(api, whole=leaves))
        content = orjson.dumps({"model": "smollm2", "input": "n=1"})
        await asked(made.app, "POST", RESPONSES, KEY, body=content, gone=gone)
        assert outcomes(made.app, "responses") == {"cancelled": 1}
        assert last_row(made.app)["ended"] == "client_closed"
        assert value(made.app.metrics, "client_disconnects_total") == 1


# ---------------------------------------------------------------- what a client left behind


def linked(edge: ProxyApp) -> tuple[WorkerLink, mock.Mock]:
    """Return a link whose worker is this test, and what stands for the socket to it."""
    line = mock.Mock()
    with mock.patch.object(worker_link, "DealerLink", lambda *_: line):
        return edge.local.pool.connect(0, "ipc:///tmp/hearth-nobody"), line


def usage_of(prompt: int, cached: int, completion: int) -> Usage:
    return Usage(prompt, cached, prompt - cached, completion, source="slot" if cached else "none")


@pytest.mark.parametrize("ended_first", [False, True])
async def test_what_a_request_of_several_choices_cost_counts_its_prompt_once_when_its_client_left(
    tmp_path: Any, ended_first: bool
) -> None:
    asked_for = {"model": "m", "prompt": ["a", "b"], "n": 3}
    request = DIALECTS["completions"].parse(asked_for)

    edge = app_of(tmp_path)
    link, line = linked(edge)
    answers = [link.submit(each, f"r-{index}") for index, each in enumerate(request.submissions())]
    for answer in answers:
        link.receive(Admitted(answer.request_id, 100))
    if ended_first:
        link.receive(Finished("r-0", "stop", None, usage_of(100, 60, 5)))
    for answer in answers:
        answer.close()
    edge.routes.requests.record(request, answers, awake_s())
    sent = [call.args[0] for call in line.send.call_args_list]
    left_ids = [message.request_id for message in sent if isinstance(message, Cancel)]
    assert len(left_ids) == 6 - ended_first
    with edge.routes.feed.listening("") as events:
        await read(events)
        for name in left_ids:
            link.receive(Finished(name, "cancelled", None, usage_of(100, 60, 5)))
            link.receive(Finished(name, "cancelled", None, usage_of(100, 60, 5)))
        told = await read_until(events, "requests")
        await events.aclose()
    assert told["requests"] == []
    counted = values(edge.metrics)
    for name, sum_ in (("prompt", 200), ("cached", 120), ("prefilled", 80), ("completion", 30)):
        assert total(counted, f"hearth_{name}_tokens_total") == sum_
        assert told["totals"][f"{name}_tokens"] == sum_, "the dashboard says the same"
    assert total(counted, "hearth_matches_total") == 2
    edge.local.pool.close()


async def test_what_a_refused_request_would_have_cost_is_nobodys(tmp_path: Any) -> None:
    edge = app_of(tmp_path)
    link, _ = linked(edge)
    before = values(edge.metrics)
    answer = link.submit(ASKED, "r")
    answer.close()
    link.receive(Failed("r", 503, "overloaded", "Full."))
    link.receive(Finished("r", "cancelled", None, USAGE))
    link.receive(Finished("never", "stop", None, USAGE))
    assert values(edge.metrics) == before
    edge.local.pool.close()


async def test_with_several_keys_what_a_client_left_behind_is_told_to_its_own_key(
    tmp_path: Any,
) -> None:
    edge = app_of(tmp_path, PROXY_API_KEYS="one,two")
    link, _ = linked(edge)
    request: ParsedRequest = dataclasses.replace(
        ASKED, prompt=dataclasses.replace(ASKED.prompt, speaker=Speaker("theirs"))
    )
    link.submit(request, "r").close()
    link.receive(Finished("r", "cancelled", None, USAGE))
    feed = edge.routes.feed
    assert feed.requests.of("theirs").totals()["prompt_tokens"] == USAGE.prompt_tokens
    assert feed.requests.of("mine").totals()["prompt_tokens"] == 0
    edge.local.pool.close()


@pytest.mark.process
async def test_a_request_that_no_worker_admits_in_time_is_called_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_link, "ADMIT_WAIT_S_MAX", 0.2)

    async with front(1) as made:
        made.stop(0)
        link = made.made.pool.links[0]
        assert await post(made, "n=1") == 503
        assert not link.answers, "its lease would be renewed, and nobody read its answer"
