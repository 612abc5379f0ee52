"""A stock LiteLLM proxy with Redis, two Hearths and a cloud, by scripts/fleet as it stands."""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.fleet.agent_turns import AGENTS, TURNS
from tests.helpers.fleet.fleet_servers import CHUNK_S, CONTEXT_TOKENS, Fleet, served_by

pytestmark = pytest.mark.night  # a stock LiteLLM, Redis and two servers
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
LONG = "word " * CONTEXT_TOKENS
LATER = "other words " * 60


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as running:
        yield running


def talk(path: str, *texts: str) -> dict[str, Any]:
    """Return the body of a conversation in the dialect of `path`, its user's texts answered."""
    rows: list[dict[str, Any]] = []
    for text in texts:
        rows += [{"role": "assistant", "content": "Yes."}] if rows else []
        rows.append({"role": "user", "content": text})
    if path.endswith("responses"):
        return {"input": rows, "max_output_tokens": 16, "stream": True}
    return {"messages": rows, "max_tokens": 4, "stream": True}


def retries(reply: httpx.Response) -> int:
    return int(reply.headers["x-litellm-attempted-retries"])


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agents_turns_meet_one_hearth_which_knows_their_session(
    fleet: Fleet, agent: str
) -> None:
    rows = AGENTS[agent]
    replies = [fleet.ask(row.path, row.body, row.headers) for row in rows]
    (name,) = (who := Counter(map(served_by, replies)))
    assert who[name] == TURNS
    asked = fleet.hearths[name].asked()[-TURNS:]
    assert {request.session for request in asked} == {rows[0].session}
    assert all(request.cached > 0 for request in asked[1:])


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_too_long_goes_to_the_cloud_and_its_session_stays_where_it_is(
    fleet: Fleet, path: str
) -> None:
    headers = {"x-session-id": f"long {path}"}
    first = served_by(fleet.ask(path, talk(path, "Hello."), headers))
    assert first in fleet.hearths
    assert served_by(fleet.ask(path, talk(path, "Hello.", LONG), headers)) == "cloud-long"
    assert served_by(fleet.ask(path, talk(path, "Hello.", "And?"), headers)) == first


def test_a_hearth_that_is_killed_amid_a_prefill_costs_its_session_one_retry(fleet: Fleet) -> None:
    path, headers = "/v1/chat/completions", {"x-session-id": "killed"}
    first = served_by(fleet.ask(path, talk(path, "Hello."), headers))
    one = fleet.hearths[first]
    other = next(name for name in fleet.hearths if name != first)
    one.pause(CHUNK_S)
    with ThreadPoolExecutor(1) as pool:
        body = talk(path, "Hello.", LATER) | {"stream": False}
        asked = pool.submit(fleet.ask, path, body, headers)
        while not one.worker()["running"]:
            assert not asked.done(), "its prefill was not seen"
            time.sleep(0.05)
        one.stop(signal.SIGKILL)
        reply = asked.result()
    assert (served_by(reply), retries(reply)) == (other, 1)
    reply = fleet.ask(path, talk(path, "Hello.", LATER, "And now?"), headers)
    assert (served_by(reply), retries(reply)) == (other, 0)
    assert fleet.hearths[other].asked()[-1].cached > 0
    assert not [row for row in fleet.cloud.generations() if LATER in row.body.decode()]
