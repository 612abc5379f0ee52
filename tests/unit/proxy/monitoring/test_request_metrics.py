"""Checks how each request is counted, and that no client's text becomes a label."""

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st
from prometheus_client import Metric

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.http.http_exchange import ClientGone
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.errors import Overloaded, PromptTooLong, RequestError, WorkerLost
from hearth.shared.wire_messages import Usage
from tests.helpers.cases import cases
from tests.helpers.clients.scraped_metrics import total
from tests.helpers.proxy.app_over_workers import front
from tests.helpers.proxy.metric_values import (
    ASKED,
    USAGE,
    answered,
    ended,
    failed,
    made,
    scraped,
    value,
    values,
)
from tests.helpers.proxy.request_bodies import BODIES, post

KINDS = ("main", "agent", "side", "none")
SOURCES = ("slot", "ram", "ssd", "none")


# ---------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([answered(reason="stop")], "stop"),
        ([answered(reason="length")], "length"),
        ([answered(reason="tool_calls")], "tool_calls"),
        ([answered(None)], "cancelled"),
        ([answered(reason="cancelled")], "failed"),  # its lease ran out though its client was there
        ([failed(500, "constraint_failed")], "failed"),
        ([failed(503, "worker_unavailable")], "failed"),
        ([failed(400, "context_length_exceeded")], "refused_4xx"),
        ([answered(), answered(None)], "cancelled"),
        ([answered(None), failed(500, "internal_error")], "failed"),
    ],
)
def test_a_request_that_a_worker_took_counts_once_as_it_ended(
    answers: list[AnswerStream], outcome: str
) -> None:
    metrics = made()
    before = values(metrics)
    ended(metrics, replace(ASKED, choices=len(answers)), answers)
    assert value(metrics, "requests_total", dialect="chat", outcome=outcome) == 1
    counted = [key for key in before if key[0] == "hearth_requests_total"]
    assert sum(values(metrics)[key] for key in counted) == 1
    assert value(metrics, "client_disconnects_total") == (outcome == "cancelled")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PromptTooLong(tokens=2, tokens_max=1), "refused_4xx"),
        (RequestError("No such key.", status=401), "refused_4xx"),
        (Overloaded("Full."), "refused_5xx"),
        (WorkerLost("Nobody is there."), "refused_5xx"),
        (RequestError("A bug.", status=500, code="internal_error"), "failed"),
        (ClientGone(), "cancelled"),
    ],
)
@pytest.mark.parametrize("dialect", [*get_args(Dialect), "prefill"])
def test_a_request_that_no_worker_took_counts_by_the_class_of_its_status(
    dialect: str, error: RequestError, outcome: str
) -> None:
    metrics = made()
    metrics.refused(dialect, error)
    assert value(metrics, "requests_total", dialect=dialect, outcome=outcome) == 1
    assert value(metrics, "client_disconnects_total") == (outcome == "cancelled")


def test_what_asks_for_no_text_is_no_request_but_its_client_may_leave() -> None:
    metrics, before = made(), values(made())
    metrics.refused(None, RequestError("No such route.", status=404))
    assert values(metrics) == before
    metrics.refused(None, ClientGone())
    assert values(metrics) == before | {("hearth_client_disconnects_total", ()): 1.0}


# ---------------------------------------------------------------- what it cost


@pytest.mark.parametrize("case", cases("proxy/answer_costs.yaml"))
def test_a_request_costs_what_the_table_says(case: dict[str, Any]) -> None:
    metrics, request = made(), replace(ASKED, choices=case.get("choices", 1))
    if body := case.get("body"):
        request = DIALECTS["completions"].parse(body)
    ended(metrics, request, [answered(replace(USAGE, **row)) for row in case["answers"]])
    told = {}
    for series in case["values"]:
        name, *labels = series.split()
        told[series] = value(metrics, name, **dict(label.split("=") for label in labels))
    assert told == pytest.approx(case["values"])


def test_a_prompt_that_was_read_and_not_answered_has_no_first_token() -> None:
    metrics = made()
    read_only = replace(USAGE, completion_tokens=0, reasoning_tokens=0)
    ended(metrics, replace(ASKED, prefill_only=True), [answered(read_only, "prefilled")])
    assert value(metrics, "requests_total", dialect="prefill", outcome="prefilled") == 1
    assert not any("first_token_seconds_count" in name for name, _ in values(metrics))
    assert value(metrics, "prefill_tokens_per_second_count", model="model") == 1


WORDS = st.sampled_from((*KINDS, "slot", "ram", "ssd", "exact", "prefix", "lcp", "", "s-1", '"}\n'))
USAGES = st.builds(
    Usage,
    *(st.integers(0, 10**6) for _ in range(5)),
    *(WORDS, st.integers(0, 10**5), st.integers(0, 10**5), st.none(), st.integers(0, 99)),
    *(st.integers(0, 10**5), WORDS, WORDS),
)


@given(st.lists(st.tuples(st.sampled_from(get_args(Dialect)), USAGES), max_size=6))
def test_whatever_is_told_the_sums_are_what_was_spent_and_no_label_is_new(
    asked: list[tuple[Dialect, Usage]],
) -> None:
    metrics = made()
    before = values(metrics).keys()
    for dialect, usage in asked:
        ended(metrics, replace(ASKED, dialect=dialect), [answered(usage)])
    told = values(metrics)
    for name in ("prompt", "cached", "prefilled", "completion", "reasoning", "image"):
        spent = sum(getattr(usage, f"{name}_tokens") for _, usage in asked)
        assert total(told, f"hearth_{name}_tokens_total") == spent
    for dialect, count in Counter(dialect for dialect, _ in asked).items():
        assert value(metrics, "requests_total", dialect=dialect, outcome="stop") == count
    assert total(told, "hearth_matches_total") == len(asked)
    for _, labels in told.keys() - before:  # histograms begin with the first of a model
        news = dict(labels)
        assert (news["model"], news.get("source", "none")) in {("model", name) for name in SOURCES}


# ---------------------------------------------------------------- over HTTP


def counted(families: dict[str, Metric], dialect: str) -> dict[str, float]:
    """Return how often each outcome of a dialect's requests was counted, where it was."""
    return {
        sample.labels["outcome"]: sample.value
        for sample in families["hearth_requests"].samples
        if sample.labels["dialect"] == dialect and sample.value
    }


@pytest.mark.process
async def test_each_request_counts_once_whatever_came_of_it() -> None:
    async with front(1) as made:
        for script in ("n=2", "n=2 fail=1", "refuse=400:odd", "refuse=503:overloaded"):
            await post(made, {"model": "smollm2", "input": script}, "/v1/responses")
        await made.ask("POST", "/v1/responses", body=b"{")
        await made.open_ask("POST", "/v1/responses", body=b"{}")
        await made.ask("GET", "/v1/responses")
        told = counted(await scraped(made), "responses")
        assert told == {"stop": 1, "failed": 1, "refused_4xx": 4, "refused_5xx": 1}
        for asked in (BODIES["chat"], {}, {"model": "smollm2", "messages": 5}):
            await post(made, asked)
        families = await scraped(made)
        assert counted(families, "prefill") == {"prefilled": 1, "refused_4xx": 2}
        assert counted(families, "responses") == told and not counted(families, "chat")


@pytest.mark.process
async def test_a_whole_answer_has_a_header_that_tells_what_the_cache_did() -> None:
    async with front(1) as made:
        for fields in ({}, {"input": "n=2 fail=1"}, {"stream": True}):
            asked = {"model": "smollm2", "input": "n=2"} | fields
            reply = await post(made, asked, "/v1/responses")
            told = reply.headers.get("x-hearth-cache")
            if fields:
                assert told is None, "an answer that broke off, or a stream's, was not known"
            else:
                kept = reply.json["usage"]["kv_cache"]
                assert told == (
                    f"hit={kept['prefix_length']} prefilled={kept['prefilled']} "
                    f"source=ram ttft_ms={kept['ttft_ms']}"
                )
