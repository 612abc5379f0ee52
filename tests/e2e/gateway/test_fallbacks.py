"""Each cause of a fallback, in each dialect, whole and as a stream: who answers, and nothing twice.

The local side is scripted workers (helpers/worker_processes/fake_worker.py), which say `tok0 tok1`;
the cloud says another text, so that an answer of both would be seen.
"""

import time
from typing import Any, Final

import pytest
import yaml

from hearth.shared.paths import PROJECT_DIR
from tests.helpers.cloud.cloud_answers import ERRORS, HELLO, CloudAnswer
from tests.helpers.cloud.dialect_requests import (
    DIALECTS,
    DialectAnswer,
    ask,
    body_of,
    by_night_in_each_way,
)
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.server import until

CASES: Final = yaml.safe_load((PROJECT_DIR / "tests/data/fallback_causes.yaml").read_text())
LOCAL: Final = "hearth/local"
TEXTS: Final = {LOCAL: "tok0 tok1"}  # of whom; of the clouds it is HELLO's
FAULTS: Final = {name: CloudAnswer(error=error) for name, error in ERRORS.items()} | {
    "drops": CloudAnswer(drops="before the head"),
    "hangs": CloudAnswer(hangs="before the head"),
}
Seen = tuple[DialectAnswer, list[str], int]  # asked of the cloud; how often of a worker


def seen_of(gateway: GatewayServer, dialect: str, model: str, script: str, **fields: Any) -> Seen:
    began = time.time()
    gateway.cloud.requests.clear()
    answer = ask(gateway.url, dialect, body_of(dialect, model, f"n=2 {script}", **fields))
    asked = [request.model for request in gateway.cloud.generations()]
    return answer, asked, len(gateway.submits(began))


def held_to(seen: Seen, case: dict[str, Any]) -> None:
    """One who may answer has, or none; what is told of who failed before, and why, is true."""
    answer, asked, local = seen
    if by := case.get("by"):
        told = (answer.status, answer.error, answer.text, answer.served_by)
        assert told == (200, "", TEXTS.get(by, HELLO.text), by), answer.raw
    else:
        status, words = case["told"]
        assert answer.status == status and answer.error and words in answer.error, answer.raw
    after = case.get("after", answer.fallback)
    assert answer.fallback.startswith(after) and bool(answer.fallback) == bool(after)
    assert (case.get("asked", asked), case.get("local", local)) == (asked, local)


@pytest.mark.parametrize("cause", CASES)
@by_night_in_each_way
def test_who_answers_where_one_cannot(
    gateway: GatewayServer, dialect: str, stream: bool, cause: str
) -> None:
    case = CASES[cause]
    if case.get("after", "").startswith("anthropic") and dialect == "completions":
        return  # Anthropic has none
    if "budget" in cause:  # one answer spends it, which is known a little later
        body = body_of("chat", case["ask"], "n=2")
        until(lambda: ask(gateway.url, "chat", body).served_by == LOCAL)
    faults = case.get("cloud", {})
    gateway.cloud.answers |= {model: FAULTS[fault] for model, fault in faults.items()}
    fields = case.get("fields", {}) | {"stream": stream}
    held_to(seen_of(gateway, dialect, case["ask"], case.get("script", ""), **fields), case)
    if "hangs" in faults.values():
        (request,) = gateway.cloud.generations()
        gateway.cloud.until(lambda: request.has_left)


# Before it admitted; when it had; after a first word.
@pytest.mark.parametrize("script", ["die=0", "delay=0.2 die=1", "n=3 delay=0.2 die=2"])
@by_night_in_each_way
def test_a_lost_worker_is_fallen_back_from_where_nothing_was_sent(
    gateway: GatewayServer, dialect: str, stream: bool, script: str
) -> None:
    script += f" {dialect}{stream}"
    seen = answer, cloud, _ = seen_of(gateway, dialect, "local-first", script, stream=stream)
    gateway.wait_until_ready()
    if not stream or "die=0" in script:
        after = f"{LOCAL} worker_lost"
        held_to(seen, {"by": "openai/gpt-mock", "after": after, "asked": ["gpt-mock"]})
        return
    assert answer.error and (cloud, answer.served_by) == ([], LOCAL)
    assert answer.text == ("tok0" if "die=2" in script else "")


@pytest.mark.parametrize("way", ["error", "dropped"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_follows_the_first_words_of_a_cloud_that_breaks_off(
    gateway: GatewayServer, dialect: str, way: str
) -> None:
    error, drops = (ERRORS["server error"], None) if way == "error" else (None, "amid the text")
    gateway.cloud.answers["flaky"] = CloudAnswer(
        "One two three four five six.", error=error, error_place="amid the text", drops=drops
    )
    answer, cloud, local = seen_of(gateway, dialect, "cloud-first", "", stream=True)
    assert answer.text.startswith("One") and answer.error, answer.raw
    assert "six" not in answer.text and "tok0" not in answer.text
    assert (cloud, local) == (["flaky"], 0)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_conversation_stays_where_it_began(gateway: GatewayServer, dialect: str) -> None:
    for talk in range(3):
        asked = [seen_of(gateway, dialect, "either", f"talk {talk}")[0] for _ in range(4)]
        assert len({answer.served_by for answer in asked}) == 1
