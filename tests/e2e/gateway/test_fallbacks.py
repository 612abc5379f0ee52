"""Each cause of a fallback, in each dialect, whole and as a stream: who answers, and nothing twice.

The local side is scripted workers (helpers/worker_processes/fake_worker.py), which say `tok0 tok1`;
the cloud says another text, so that an answer of both would be seen.
"""

import time
from typing import Final

import pytest

from tests.helpers.cloud import cloud_answers as says
from tests.helpers.cloud.cloud_answers import HELLO, CloudAnswer, CloudError
from tests.helpers.cloud.dialect_requests import DIALECTS, DialectAnswer, ask, body_of, in_each_way
from tests.helpers.cloud.gateway_server import GatewayServer

LOCAL: Final = "hearth/local"
TEXTS: Final = {LOCAL: "tok0 tok1"}  # of whom; of the clouds it is HELLO's
Seen = tuple[DialectAnswer, list[str], int]  # asked of the cloud; how often of a worker

# Group, what the local model does or the cloud "flaky" answers; who answers then, what is told of
# who failed; the models that the cloud was asked for, and how often a worker was asked.
Case = tuple[str, str | CloudError | CloudAnswer, str, str, list[str], int]
CASES: Final[dict[str, Case]] = {
    "full queue": (
        *("local-first", "n=2 full=0", "openai/gpt-mock", f"{LOCAL} overloaded"),
        *(["gpt-mock"], 1),
    ),
    "too long": (
        *("local-first", "n=2 refuse=400:context_length_exceeded", "openai/spare"),
        *(f"{LOCAL} prompt_too_long", ["spare"], 1),
    ),
    "cannot load": (
        *("broken-first", "n=2", "openai/gpt-mock", "hearth/broken model_not_loadable"),
        *(["gpt-mock"], 0),
    ),
    "two of three": (
        *("lost", "n=2", "openai/spare", "hearth/broken model_not_loadable; openai/denied"),
        *(["denied", "spare"], 0),
    ),
    "429": (
        *("cloud-first", says.RATE_LIMIT, LOCAL, "openai/flaky rate_limited"),
        *(["flaky"], 1),
    ),
    "500": ("cloud-first", says.SERVER_ERROR, LOCAL, "openai/flaky cloud_error", ["flaky"], 1),
    "dropped": (
        *("cloud-first", CloudAnswer(drops="before the head"), LOCAL, "openai/flaky cloud_error"),
        *(["flaky"], 1),
    ),
    "silent": (
        *("slow-first", CloudAnswer(hangs="before the head"), LOCAL, "openai/slow timeout"),
        *(["slow"], 1),
    ),
    "wrong key": ("denied-first", "n=2", LOCAL, "openai/denied cloud_error", ["denied"], 1),
    "nobody there": ("refused-first", "n=2", LOCAL, "openai/refused cloud_error", [], 1),
    "redirect": ("back", "n=2", LOCAL, "anthropic/x cloud_error", [], 1),
    "cloud's too long": (
        *("cloud-first", says.CONTEXT_LENGTH, "openai/spare", "openai/flaky prompt_too_long"),
        *(["flaky", "spare"], 0),
    ),
    "cloud's policy": (
        *("cloud-first", says.CONTENT_POLICY, "openai/strict-spare"),
        *("openai/flaky content_policy", ["flaky", "strict-spare"], 0),
    ),
    "overloaded": (
        *("claude-first", says.OVERLOADED, LOCAL, "anthropic/flaky cloud_error"),
        *(["flaky"], 1),
    ),
    "too long for Claude": (  # which is known by its words alone
        *("claude-first", says.PROMPT_TOO_LONG, "openai/spare", "anthropic/flaky prompt_too_long"),
        *(["flaky", "spare"], 0),
    ),
    "none needed": ("local-first", "n=2", LOCAL, "", [], 1),
    "none needed there": ("cloud", "n=2", "openai/gpt-mock", "", ["gpt-mock"], 0),
}


def seen_of(gateway: GatewayServer, dialect: str, model: str, script: str, stream: bool) -> Seen:
    began = time.time()
    gateway.cloud.requests.clear()
    answer = ask(gateway.url, dialect, body_of(dialect, model, script, stream=stream))
    asked = [request.model for request in gateway.cloud.generations()]
    return answer, asked, len(gateway.submits(began))


def held_to(seen: Seen, served_by: str, fallback: str, asked: list[str], local: int = -1) -> None:
    """The one answer is whole and from `served_by`; it tells who failed before, and why."""
    answer, cloud, submits = seen
    assert (answer.status, answer.error) == (200, ""), answer.raw
    assert answer.text == TEXTS.get(served_by, HELLO.text)
    assert (answer.served_by, cloud) == (served_by, asked)
    assert answer.fallback == fallback or (fallback and answer.fallback.startswith(fallback))
    assert submits == local or local < 0


@pytest.mark.parametrize("cause", CASES)
@in_each_way
def test_who_answers_where_one_cannot(
    gateway: GatewayServer, dialect: str, stream: bool, cause: str
) -> None:
    model, does, served_by, fallback, asked, local = CASES[cause]
    if fallback.startswith("anthropic") and dialect == "completions":
        return  # Anthropic has none
    if not isinstance(does, str):
        error = does if isinstance(does, CloudError) else None
        name = "slow" if model == "slow-first" else "flaky"
        gateway.cloud.answers[name] = CloudAnswer(error=error) if error else does
    script = does if isinstance(does, str) else "n=2"
    held_to(seen_of(gateway, dialect, model, script, stream), served_by, fallback, asked, local)
    if cause == "silent":
        (request,) = gateway.cloud.generations()
        gateway.cloud.until(lambda: request.left_at is not None)


@in_each_way
def test_a_group_over_its_budget_goes_back_to_the_local_model(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    deadline = time.monotonic() + 20  # one answer spends it, which is known a little later
    while ask(gateway.url, "chat", body_of("chat", "costly-first", "n=2")).served_by != LOCAL:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    seen = seen_of(gateway, dialect, "costly-first", "n=2", stream)
    held_to(seen, LOCAL, "costly-first over_budget", [], 1)  # none of the group may be asked


@pytest.mark.parametrize(
    "script",
    # Before it admitted; when it had; after a first word.
    ["n=2 die=0", "n=2 delay=0.2 die=1", "n=3 delay=0.2 die=2"],
)
@in_each_way
def test_a_lost_worker_is_fallen_back_from_where_nothing_was_sent(
    gateway: GatewayServer, dialect: str, stream: bool, script: str
) -> None:
    seen = seen_of(gateway, dialect, "local-first", f"{script} {dialect}{stream}", stream)
    gateway.wait_until_ready()
    if not stream or "die=0" in script:
        held_to(seen, "openai/gpt-mock", f"{LOCAL} worker_lost", ["gpt-mock"])
        return
    answer, cloud, _ = seen
    assert answer.error and (cloud, answer.served_by) == ([], LOCAL)
    assert answer.text == ("tok0" if "die=2" in script else "")


@pytest.mark.parametrize("way", ["error", "dropped"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_follows_the_first_words_of_a_cloud_that_breaks_off(
    gateway: GatewayServer, dialect: str, way: str
) -> None:
    text = "One two three four five six."
    gateway.cloud.answers["flaky"] = (
        CloudAnswer(text, error=says.SERVER_ERROR, error_place="amid the text")
        if way == "error"
        else CloudAnswer(text, drops="amid the text")
    )
    answer, cloud, local = seen_of(gateway, dialect, "cloud-first", "n=2", True)
    assert answer.text.startswith("One") and answer.error, answer.raw
    assert "six" not in answer.text and "tok0" not in answer.text
    assert (cloud, local) == (["flaky"], 0)


@in_each_way
def test_a_mistake_of_the_client_stays_its_own(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    """One that the proxy finds, one of the worker's, and one of the cloud's."""
    gateway.cloud.answers["flaky"] = CloudAnswer(error=says.INVALID)
    for model, script, fields, asked in (
        ("local-first", "n=2 refuse=400:invalid_request", {}, 0),
        ("local-first", "n=2", {"temperature": "x"}, 0),
        ("cloud-first", "n=2", {}, 1),
    ):
        gateway.cloud.requests.clear()
        body = body_of(dialect, model, script, stream=stream, **fields)
        answer = ask(gateway.url, dialect, body)
        assert answer.status == 400 and answer.error, answer.raw
        assert not answer.fallback and len(gateway.cloud.generations()) == asked
    assert "must be at most 2" in answer.error


@in_each_way
def test_a_group_of_both_sides_tries_its_other_deployment_first(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    gateway.cloud.answers["gpt-mock"] = CloudAnswer(error=says.SERVER_ERROR)
    answer, *_ = seen_of(gateway, dialect, "either", "n=2", stream)
    assert (answer.text, answer.served_by) == (TEXTS[LOCAL], LOCAL)
    gateway.cloud.answers.clear()
    answer, *_ = seen_of(gateway, dialect, "either", "n=2 full=0", stream)
    assert (answer.text, answer.served_by) == (HELLO.text, "openai/gpt-mock")
    talks = [seen_of(gateway, dialect, "either", f"n=2 talk {n // 4}", stream) for n in range(12)]
    for at in range(0, 12, 4):  # a conversation stays where it began
        assert len({answer.served_by for answer, *_ in talks[at : at + 4]}) == 1


def test_where_nobody_can_answer_the_first_failure_is_told(gateway: GatewayServer) -> None:
    gateway.cloud.answers["flaky"] = CloudAnswer(error=says.RATE_LIMIT)
    for dialect in DIALECTS:
        body = body_of(dialect, "cloud-first", "n=2 full=0")
        answer = ask(gateway.url, dialect, body)
        assert answer.status == 429 and "Rate limit reached" in answer.error, answer.raw
