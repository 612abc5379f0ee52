"""Each cause of a fallback, in each dialect, whole and as a stream: who answers, and nothing twice.

The local side is scripted workers (helpers/worker_processes/fake_worker.py), which say `tok0 tok1`;
the cloud says another text, so that an answer of both would be seen.
"""

import time
from dataclasses import dataclass
from typing import Final

import pytest

from tests.helpers.cloud import cloud_answers as answers
from tests.helpers.cloud.cloud_answers import HELLO, CloudAnswer
from tests.helpers.cloud.dialect_requests import DIALECTS, DialectAnswer, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer

LOCAL_TEXT: Final = "tok0 tok1"
CLOUD_TEXT: Final = HELLO.text
WAYS: Final = [
    pytest.param(dialect, stream, id=f"{dialect}-{'stream' if stream else 'whole'}")
    for dialect in DIALECTS
    for stream in (False, True)
]
in_each_way = pytest.mark.parametrize(("dialect", "stream"), WAYS)


@dataclass(frozen=True)
class Told:
    """What a client saw of one request, and what each side was asked."""

    answer: DialectAnswer
    cloud: list[str]  # models
    local: int  # how often a worker was asked


def told(gateway: GatewayServer, dialect: str, model: str, script: str, stream: bool) -> Told:
    began = time.time()
    gateway.cloud.requests.clear()
    answer = ask(gateway.url, dialect, body_of(dialect, model, script, stream=stream))
    asked = [request.model for request in gateway.cloud.generations()]
    return Told(answer, asked, len(gateway.submits(began)))


def held_to(seen: Told, text: str, served_by: str, fallback: str) -> None:
    """The one answer is `text`, whole and from `served_by`; it tells who failed before, and why."""
    answer = seen.answer
    assert answer.status == 200, answer.raw
    assert answer.text.strip() == text
    assert not answer.error
    assert answer.served_by == served_by
    assert answer.fallback == fallback


# ---------------------------------------------------------------- local first


@in_each_way
def test_a_full_queue_goes_to_the_cloud(gateway: GatewayServer, dialect: str, stream: bool) -> None:
    seen = told(gateway, dialect, "local-first", "n=2 full=0", stream)
    held_to(seen, CLOUD_TEXT, "openai/gpt-mock", "hearth/local overloaded")
    assert (seen.cloud, seen.local) == (["gpt-mock"], 1)


@in_each_way
def test_a_prompt_that_is_too_long_goes_where_long_ones_go(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    script = "n=2 refuse=400:context_length_exceeded"
    seen = told(gateway, dialect, "local-first", script, stream)
    held_to(seen, CLOUD_TEXT, "openai/spare", "hearth/local prompt_too_long")
    assert (seen.cloud, seen.local) == (["spare"], 1)


@in_each_way
def test_a_model_that_cannot_be_loaded_goes_to_the_cloud(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    seen = told(gateway, dialect, "broken-first", "n=2", stream)
    held_to(seen, CLOUD_TEXT, "openai/gpt-mock", "hearth/broken model_not_loadable")
    assert (seen.cloud, seen.local) == (["gpt-mock"], 0)


@in_each_way
def test_a_worker_lost_before_it_admitted_goes_to_the_cloud(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    seen = told(gateway, dialect, "local-first", f"n=2 die=0 {dialect}{stream}", stream)
    gateway.wait_until_ready()
    held_to(seen, CLOUD_TEXT, "openai/gpt-mock", "hearth/local worker_lost")
    assert seen.cloud == ["gpt-mock"]


@in_each_way
def test_a_worker_lost_amid_its_answer_goes_to_the_cloud_only_where_nothing_was_sent(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    seen = told(gateway, dialect, "local-first", f"n=3 die=2 delay=0.2 {dialect}{stream}", stream)
    gateway.wait_until_ready()
    if not stream:
        held_to(seen, CLOUD_TEXT, "openai/gpt-mock", "hearth/local worker_lost")
        assert seen.cloud == ["gpt-mock"]
        return
    assert seen.answer.text.strip() == "tok0"
    assert seen.answer.error
    assert seen.answer.served_by == "hearth/local"
    assert seen.cloud == []


@in_each_way
def test_a_worker_lost_after_it_admitted_a_stream_ends_it_with_an_error(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    seen = told(gateway, dialect, "local-first", f"n=2 delay=0.2 die=1 {dialect}{stream}", stream)
    gateway.wait_until_ready()
    if not stream:
        held_to(seen, CLOUD_TEXT, "openai/gpt-mock", "hearth/local worker_lost")
        return
    assert (seen.answer.text, seen.cloud) == ("", [])
    assert seen.answer.error


@in_each_way
def test_a_clients_own_mistake_stays_its_own(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    """Both one that the proxy finds and one that the worker finds."""
    for script, fields in (("n=2 refuse=400:invalid_request", {}), ("n=2", {"temperature": "x"})):
        body = body_of(dialect, "local-first", script, stream=stream, **fields)
        answer = ask(gateway.url, dialect, body)
        assert answer.status == 400, answer.raw
        assert answer.error
        assert not answer.fallback
    assert gateway.cloud.generations() == []


# ---------------------------------------------------------------- cloud first

FAILURES: Final = {
    "429": (CloudAnswer(error=answers.RATE_LIMIT), "rate_limited"),
    "500": (CloudAnswer(error=answers.SERVER_ERROR), "cloud_error"),
    "dropped": (CloudAnswer(drops="before the head"), "cloud_error"),
}
UNUSABLE: Final = {
    "denied-first": "openai/denied cloud_error",
    "refused-first": "openai/refused cloud_error",
    "costly-first": "costly-first over_budget",  # of the group: none of it may be asked
}


@pytest.mark.parametrize("cause", FAILURES)
@in_each_way
def test_a_cloud_that_fails_goes_back_to_the_local_model(
    gateway: GatewayServer, dialect: str, stream: bool, cause: str
) -> None:
    gateway.cloud.answers["flaky"], _ = FAILURES[cause]
    seen = told(gateway, dialect, "cloud-first", "n=2", stream)
    held_to(seen, LOCAL_TEXT, "hearth/local", f"openai/flaky {FAILURES[cause][1]}")
    assert (seen.cloud, seen.local) == (["flaky"], 1)


@pytest.mark.parametrize("model", UNUSABLE)
@in_each_way
def test_a_cloud_that_cannot_be_used_goes_back_to_the_local_model(
    gateway: GatewayServer, dialect: str, stream: bool, model: str
) -> None:
    """Its key is wrong, nothing listens there, or its budget is spent by a first request."""
    if model == "costly-first":
        spend_the_budget(gateway)
    seen = told(gateway, dialect, model, "n=2", stream)
    held_to(seen, LOCAL_TEXT, "hearth/local", UNUSABLE[model])
    assert (len(seen.cloud), seen.local) == (int(model == "denied-first"), 1)


def spend_the_budget(gateway: GatewayServer) -> None:
    """Ask until the provider's budget is known to be spent, which one answer does."""
    body = body_of("chat", "costly-first", "n=2")
    deadline = time.monotonic() + 20
    while ask(gateway.url, "chat", body).served_by != "hearth/local":
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cloud_that_does_not_answer_in_its_time_goes_back_to_the_local_model(
    gateway: GatewayServer, stream: bool
) -> None:
    gateway.cloud.answers["slow"] = CloudAnswer(hangs="before the head")
    dialect = "messages" if stream else "chat"
    seen = told(gateway, dialect, "slow-first", "n=2", stream)
    held_to(seen, LOCAL_TEXT, "hearth/local", "openai/slow timeout")
    assert (seen.cloud, seen.local) == (["slow"], 1)
    (request,) = gateway.cloud.generations()
    gateway.cloud.until(lambda: request.left_at is not None)


@in_each_way
def test_a_prompt_too_long_for_the_cloud_goes_where_long_ones_go(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=answers.CONTEXT_LENGTH)
    seen = told(gateway, dialect, "cloud-first", "n=2", stream)
    held_to(seen, CLOUD_TEXT, "openai/spare", "openai/flaky prompt_too_long")
    assert (seen.cloud, seen.local) == (["flaky", "spare"], 0)


@in_each_way
def test_a_prompt_that_the_cloud_will_not_answer_goes_where_such_go(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=answers.CONTENT_POLICY)
    seen = told(gateway, dialect, "cloud-first", "n=2", stream)
    held_to(seen, CLOUD_TEXT, "openai/strict-spare", "openai/flaky content_policy")
    assert (seen.cloud, seen.local) == (["flaky", "strict-spare"], 0)


@in_each_way
def test_what_the_cloud_calls_the_clients_mistake_stays_one(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=answers.INVALID)
    seen = told(gateway, dialect, "cloud-first", "n=2", stream)
    assert seen.answer.status == 400, seen.answer.raw
    assert "must be at most 2" in seen.answer.error
    assert (seen.cloud, seen.local) == (["flaky"], 0)


@pytest.mark.parametrize("way", ["error", "dropped"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_follows_the_first_words_of_a_cloud_that_breaks_off(
    gateway: GatewayServer, dialect: str, way: str
) -> None:
    script = CloudAnswer(
        "One two three four five six.",
        error=answers.SERVER_ERROR if way == "error" else None,
        error_place="amid the text",
        drops="amid the text" if way == "dropped" else None,
    )
    gateway.cloud.answers["flaky"] = script
    seen = told(gateway, dialect, "cloud-first", "n=2", True)
    assert seen.answer.text.startswith("One")
    assert "six" not in seen.answer.text and "tok0" not in seen.answer.text
    assert seen.answer.error, seen.answer.raw
    assert (seen.cloud, seen.local) == (["flaky"], 0)


def test_an_anthropic_cloud_that_is_overloaded_goes_back_to_the_local_model(
    gateway: GatewayServer,
) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=answers.OVERLOADED)
    for dialect in ("chat", "messages", "responses"):
        for stream in (False, True):
            seen = told(gateway, dialect, "claude-first", "n=2", stream)
            held_to(seen, LOCAL_TEXT, "hearth/local", "anthropic/flaky cloud_error")
            assert (seen.cloud, seen.local) == (["flaky"], 1)


def test_a_prompt_too_long_for_an_anthropic_cloud_is_known_by_its_words(
    gateway: GatewayServer,
) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=answers.PROMPT_TOO_LONG)
    for dialect in ("chat", "messages", "responses"):
        for stream in (False, True):
            seen = told(gateway, dialect, "claude-first", "n=2", stream)
            held_to(seen, CLOUD_TEXT, "openai/spare", "anthropic/flaky prompt_too_long")
            assert (seen.cloud, seen.local) == (["flaky", "spare"], 0)


# ---------------------------------------------------------------- one group of both


@in_each_way
def test_a_group_of_both_sides_tries_its_other_deployment_first(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    gateway.cloud.answers["gpt-mock"] = CloudAnswer(error=answers.SERVER_ERROR)
    seen = told(gateway, dialect, "either", "n=2", stream)
    assert seen.answer.text.strip() == LOCAL_TEXT
    assert seen.answer.served_by == "hearth/local"
    gateway.cloud.answers.clear()
    seen = told(gateway, dialect, "either", "n=2 full=0", stream)
    assert seen.answer.text.strip() == CLOUD_TEXT
    assert seen.answer.served_by == "openai/gpt-mock"


def test_a_request_that_needs_no_fallback_tells_of_none(gateway: GatewayServer) -> None:
    for dialect in DIALECTS:
        held_to(told(gateway, dialect, "local-first", "n=2", True), LOCAL_TEXT, "hearth/local", "")
        held_to(told(gateway, dialect, "cloud", "n=2", True), CLOUD_TEXT, "openai/gpt-mock", "")
