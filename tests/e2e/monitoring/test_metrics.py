"""GET /metrics of a real server: what Prometheus reads there is what its requests cost."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.clients.scraped_metrics import Series, families_of, series_of, total
from tests.helpers.servers.server import WAIT_S_MAX, Server

SYSTEM = "You are careful. " + "Read what you are given twice. " * 20
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
# What a name may end with beside the units: what a gauge counts.
COUNTED = (
    *("running", "waiting", "in_flight", "extents", "snapshots", "entries", "slots", "slots_max"),
    *("trunk_rows", "trunks", "running_max", "files", "frames", "up", "state", "tight", "bits"),
    *("awake", "pressure", "suspects", "refused", "connections"),
)
UNITS = ("_seconds", "_bytes", "_ratio", "_info", "_per_second")
OF_VISION = {f"hearth_vision_{n}" for n in ("encoder_calls", "encoder_seconds", "failures")}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    server.wait_until_idle()
    with httpx.Client(base_url=server.url, timeout=WAIT_S_MAX) as client:
        yield client


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
        is_counter = family.type == "counter"
        assert is_counter == (f"# TYPE {name}_total counter" in text)
        assert is_counter or name.endswith(UNITS) or name.removeprefix("hearth_").endswith(COUNTED)
        assert all(sample.value >= 0 for sample in family.samples), name
    silent = {name for name, family in families.items() if not family.samples}
    # Some models draft nothing, and without a LiteLLM config nobody else answers.
    unused = ("hearth_speculation", "hearth_cloud")
    assert {name for name in silent if not name.startswith(unused)} == OF_VISION


@pytest.mark.parametrize("dialect", PATHS)
def test_the_counters_are_what_the_answers_say_they_cost(http: httpx.Client, dialect: str) -> None:
    def scraped() -> dict[Series, float]:
        return series_of(families_of(http.get("/metrics").raise_for_status().text).values())

    before = scraped()
    usages = [whole(http, dialect, f"Tell {dialect} of {n}.") for n in ("one", "two", "one")]
    more = {"stream_options": {"include_usage": True}} if dialect in ("chat", "completions") else {}
    body = body_of(dialect, f"Tell {dialect} of one.", stream=True, **more)
    events = http.post(PATHS[dialect], json=body).raise_for_status().text
    (kept,) = set(re.findall(r'"kv_cache": ?\{[^}]*"ttft_ms": ?(\d+)', events))
    after = scraped()

    def grown(name: str, **labels: str) -> float:
        return total(after, f"hearth_{name}", **labels) - total(before, f"hearth_{name}", **labels)

    told = [cost(usage) for usage in usages]
    assert told[2]["cached"] > told[0]["cached"], "or this test tells little"
    told.append(told[2])  # the stream's, whose prompt is the last's and is kept as far
    for name in told[0]:
        assert grown(f"{name}_tokens_total") == sum(row[name] for row in told), name
    for name in usages[0]["speculation"]:
        (streamed,) = set(re.findall(rf'"{name}": ?(\d+)', events))
        answered = sum(usage["speculation"][name] for usage in usages)
        assert grown(f"{name}_total") == answered + int(streamed), name
    assert grown("requests_total", dialect=dialect, outcome="length") == 4
    counts = ("time_to_first_token_seconds", "decode_tokens_per_second", "queue_wait_seconds")
    of_each = ("requests_total", "matches_total", *(f"{name}_count" for name in counts))
    assert [grown(name) for name in of_each] == [4] * len(of_each)
    shares = [row["cached"] / row["prompt"] for row in told]
    assert grown("match_ratio_sum") == pytest.approx(sum(shares))
    ttft_ms = [usage["kv_cache"]["ttft_ms"] for usage in usages] + [int(kept)]
    assert grown("time_to_first_token_seconds_sum") * 1000 == pytest.approx(sum(ttft_ms))
