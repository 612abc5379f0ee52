"""GET /metrics of a real server: what Prometheus reads there is what its requests cost."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.clients.scraped_metrics import Series, families_of, series_of, total
from tests.helpers.servers.server import Server

KEY = "k"
HEADERS = {"authorization": f"Bearer {KEY}"}
SYSTEM = "You are careful. " + "Read what you are given twice. " * 20
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
PREFILL = "/v1/cache/prefill"
SESSIONS = (
    100  # tests/unit/proxy/monitoring/test_request_metrics.py has a thousand, without the model
)
WAIT_S = 60.0
# What a name may end with beside the units: what a gauge counts.
COUNTED = (
    *(
        "running",
        "waiting",
        "in_flight",
        "extents",
        "snapshots",
        "entries",
        "slots",
        "slots_max",
        "trunk_rows",
        "trunks",
    ),
    "running_max",
    *("files", "frames", "up", "state", "tight", "bits", "awake", "pressure"),
    *("suspects", "refused", "connections"),
)
UNITS = ("_seconds", "_bytes", "_ratio", "_info", "_per_second")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = {"MODEL_PATH": str(fixture_dir("qwen3", tiny=True)), "PROXY_MODEL_ID": "local"}
    with (
        Server(**settings, PROXY_API_KEY=KEY) as running,
        httpx.Client(base_url=running.url, headers=HEADERS, timeout=WAIT_S) as client,
    ):
        yield client


def scrape(http: httpx.Client) -> dict[Series, float]:
    return series_of(families_of(http.get("/metrics").raise_for_status().text).values())


def until(http: httpx.Client, holds: Callable[[dict[Series, float]], bool]) -> dict[Series, float]:
    """Return the first scrape of which this holds."""
    deadline = time.monotonic() + WAIT_S
    while not holds(series := scrape(http)):
        assert time.monotonic() < deadline, series
        time.sleep(0.05)
    return series


def body_of(dialect: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return a body whose answer has 20 tokens."""
    said = [{"role": "user", "content": text}]
    shapes: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "system", "content": SYSTEM}, *said], "max_tokens": 20},
        "completions": {"prompt": SYSTEM + text, "max_tokens": 20},
        "messages": {"system": SYSTEM, "messages": said, "max_tokens": 20},
        "responses": {"instructions": SYSTEM, "input": text, "max_output_tokens": 20},
    }
    return {"model": "local", "temperature": 0} | shapes[dialect] | fields


def cost(usage: dict[str, Any]) -> dict[str, int]:
    """Return what a dialect's usage says in the words of the counters."""
    kept = usage["kv_cache"]
    return {
        "prompt": kept["prefix_length"] + kept["prefilled"],
        "cached": kept["prefix_length"],
        "prefilled": kept["prefilled"],
        "completion": usage.get("completion_tokens", usage.get("output_tokens")),
    }


def whole(http: httpx.Client, dialect: str, text: str) -> dict[str, Any]:
    """Have a prompt answered; return the usage, which the header has to agree with."""
    reply = http.post(PATHS[dialect], json=body_of(dialect, text)).raise_for_status()
    usage: dict[str, Any] = reply.json()["usage"]
    kept = usage["kv_cache"]
    assert reply.headers["x-hearth-cache"] == (
        f"hit={kept['prefix_length']} prefilled={kept['prefilled']} source={kept['source']} "
        f"ttft_ms={kept['ttft_ms']}"
    )
    return usage


def test_every_family_is_told_as_prometheus_wants_it(http: httpx.Client) -> None:
    whole(http, "chat", "Hello.")
    text = http.get("/metrics").text
    families = families_of(text)
    assert re.findall(r"^# HELP (\S+) \S", text, re.M) == re.findall(r"^# TYPE (\S+) ", text, re.M)
    assert len(families) == text.count("# TYPE ") > 50
    for name, family in families.items():
        assert re.fullmatch(r"hearth(_[a-z]+)+", name) and len(family.documentation) > 10, name
        assert family.type in ("counter", "gauge", "histogram")
        is_counter = family.type == "counter"
        assert is_counter == (f"# TYPE {name}_total counter" in text)
        assert is_counter or name.endswith(UNITS) or name.removeprefix("hearth_").endswith(COUNTED)
        assert all(sample.value >= 0 for sample in family.samples), name
    silent = {name for name, family in families.items() if not family.samples}
    of_vision = {f"hearth_vision_{n}" for n in ("encoder_calls", "encoder_seconds", "failures")}
    # Some models draft nothing, and without a LiteLLM config nobody else answers.
    unused = ("hearth_speculation", "hearth_cloud")
    used = {name for name in silent if not name.startswith(unused)}
    assert used == of_vision


@pytest.mark.parametrize("dialect", PATHS)
def test_the_counters_are_what_the_answers_say_they_cost(http: httpx.Client, dialect: str) -> None:
    before = scrape(http)
    usages = [whole(http, dialect, f"Tell {dialect} of {n}.") for n in ("one", "two", "one")]
    stream_options = {"stream_options": {"include_usage": True}}
    more = stream_options if dialect in ("chat", "completions") else {}
    body = body_of(dialect, f"Tell {dialect} of one.", stream=True, **more)
    with http.stream("POST", PATHS[dialect], json=body) as reply:
        events = reply.raise_for_status().read().decode()
    (kept,) = {found for found in re.findall(r'"kv_cache": ?\{[^}]*"ttft_ms": ?(\d+)', events)}
    assert "x-hearth-cache" not in reply.headers
    after = scrape(http)

    def grown(name: str, **labels: str) -> float:
        return total(after, f"hearth_{name}", **labels) - total(before, f"hearth_{name}", **labels)

    told = [cost(usage) for usage in usages]
    told.append(told[2])  # the stream's, whose prompt is the last's and is kept as far
    for name in ("prompt", "cached", "prefilled", "completion"):
        assert grown(f"{name}_tokens_total") == sum(row[name] for row in told), name
    for name in usages[0]["speculation"]:
        (streamed,) = set(re.findall(rf'"{name}": ?(\d+)', events))
        answered = sum(usage["speculation"][name] for usage in usages)
        assert grown(f"{name}_total") == answered + int(streamed), name
    assert told[2]["cached"] > told[0]["cached"], "or this test tells little"
    assert grown("requests_total", dialect=dialect, outcome="length") == 4
    assert grown("requests_total") == 4 and grown("matches_total") == 4
    shares = [row["cached"] / row["prompt"] for row in told]
    assert grown("match_ratio_sum") == pytest.approx(sum(shares))
    ttft_ms = [usage["kv_cache"]["ttft_ms"] for usage in usages] + [int(kept)]
    assert grown("time_to_first_token_seconds_sum") * 1000 == pytest.approx(sum(ttft_ms))
    assert grown("time_to_first_token_seconds_count") == 4
    assert grown("decode_tokens_per_second_count") == 4
    assert grown("queue_wait_seconds_count") == 4


def test_what_a_client_leaves_behind_is_counted_with_what_was_read_for_it(
    http: httpx.Client,
) -> None:
    before = scrape(http)
    body = body_of("chat", "Count. " * 200, stream=True, max_tokens=30_000)
    with http.stream("POST", PATHS["chat"], json=body) as reply:
        next(reply.iter_lines())
    left = {"dialect": "chat", "outcome": "cancelled"}
    name = "hearth_prompt_tokens_total"
    after = until(http, lambda now: total(now, name) > total(before, name))
    assert total(after, "hearth_requests_total", **left) == 1
    assert total(after, "hearth_client_disconnects_total") == 1
    assert total(after, name) - total(before, name) > 200


def test_who_has_no_key_is_told_nothing_and_counts_as_refused(http: httpx.Client) -> None:
    before = scrape(http)
    wrong = {"authorization": "Bearer wrong"}
    refused = [http.get("/metrics", headers=wrong), httpx.get(http.base_url.join("/metrics"))]
    assert [reply.status_code for reply in refused] == [401, 401]
    assert not any("hearth_" in reply.text for reply in refused)
    assert http.post(PATHS["messages"], json={}, headers=wrong).status_code == 401
    counted = {"dialect": "messages", "outcome": "refused_4xx"}
    name = "hearth_requests_total"
    assert total(scrape(http), name, **counted) == total(before, name, **counted) + 1


def test_many_sessions_do_not_grow_the_label_sets(http: httpx.Client) -> None:
    def ask(number: int) -> int:
        headers = {"x-session-id": f"session-{number}", "x-claude-code-agent-id": f"a{number}"}
        body = {"model": "local", "messages": [{"role": "user", "content": f"q{number}"}]}
        body |= {"metadata": {"user_id": f"user-{number}"}}
        return http.post(PREFILL, json=body, headers=headers).status_code

    assert ask(SESSIONS) == 200  # the histograms of a model begin with its first request
    before = scrape(http)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(SESSIONS))) == {200}
    after = scrape(http)
    assert after.keys() - before.keys() == set()
    counted = {"dialect": "prefill", "outcome": "prefilled"}
    name = "hearth_requests_total"
    assert total(after, name, **counted) - total(before, name, **counted) == SESSIONS
    assert len(http.get("/v1/sessions").json()["sessions"]) >= SESSIONS
    assert not any(re.search(r"session-\d|user-\d|a\d", str(labels)) for _, labels in after)
