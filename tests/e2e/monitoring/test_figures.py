"""Each figure of /v1/cache, /v1/sessions and /metrics beside what clients were told, on one server.

Clients are told what each of their requests cost: those numbers, added up here, are the hand
count. What the page makes of the figures is test_dashboard_page.py's.
"""

import base64
import io
from collections import Counter
from collections.abc import Iterator
from statistics import mean
from typing import Any

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import painted
from tests.helpers.clients.scraped_metrics import families_of, series_of, total
from tests.helpers.servers.server import WAIT_S_MAX, Server

Row = dict[str, Any]
ROW_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, their size, bytes: the fixture's config
CONTEXT_TOKENS = 131_072  # of the same
ENDS = (3_053, 3_055)  # its end tokens
ANSWER = 24  # tokens: enough for a speed
IDS = [*range(10, 330)]
OTHERS = [*range(1_000, 1_060)]
FILLERS = 6  # prompts that share no beginning and fill the cache
SETTINGS = {
    "PROXY_MODEL_ID": "local",
    "LIVE_SLOTS_MAX": "2",
    "CACHE_RAM_BUDGET_MB": "4",
    "CACHE_STORE_BITS": "8",
    "KV_GROUP_SIZE": "32",
    "MAX_KV_SIZE_GB": "0",
    "PREFILL_CHUNK": "64",
    "DEFAULT_TEMPERATURE": "0",
}
COUNTERS = ("vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")


class Talk:
    """Asks one server, and keeps what each answer says it cost."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.usages: list[Row] = []

    def ask(self, path: str, **body: Any) -> str:
        body |= {"model": "local", "max_tokens": ANSWER, "enable_thinking": False}
        answer = self.http.post(path, json=body).raise_for_status().json()
        self.usages.append(answer["usage"])
        choice = answer["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])

    def two_turns(self, session: str, first: Any, second: str) -> None:
        messages = [{"role": "user", "content": first}]
        for text in (second, ""):
            said = self.ask("/v1/chat/completions", messages=messages, session_id=session)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]

    def of_all_kinds(self) -> None:
        """Ask what matches in each way, what shows an image, and more than the cache can hold."""
        for ids in (IDS, IDS + OTHERS, IDS[:200], [*IDS[:200], *OTHERS], IDS):
            self.ask("/v1/completions", prompt=ids)
        question = [{"type": "text", "text": "What is this? " * 20}, picture()]
        self.two_turns("screenshots", question, "And what else do you see?")
        for number in range(FILLERS):
            self.ask("/v1/completions", prompt=[*range(400 + number, 800 + number)])
        self.two_turns("read-the-notes", "Read the notes. " * 60, "Which comes first?")


def picture() -> Row:
    file = io.BytesIO()
    painted(1, (224, 160)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def told_by(http: httpx.Client) -> Row:
    """Return what is told at one time: between two looks at the cache that are alike."""
    while True:
        before = http.get("/v1/cache").json()
        scraped = http.get("/metrics").text
        recent = http.get("/v1/sessions").json()["recent"]
        after = http.get("/v1/cache").json()
        kept = ("bytes", "slots_bytes", "evictions", "idle_tokens")
        worker, now = before["workers"][0], after["workers"][0]
        if [worker[name] for name in kept] == [now[name] for name in kept]:
            metrics = series_of(families_of(scraped).values())
            return {"totals": after["totals"], "cache": now, "recent": recent, "metrics": metrics}


def amid_an_answer(http: httpx.Client) -> Row:
    """Return what is told while an answer is written, whose client leaves it then."""
    body = {"model": "local", "prompt": IDS, "max_tokens": 30_000, "stream": True}
    body["logit_bias"] = dict.fromkeys(map(str, ENDS), -100)
    with http.stream("POST", "/v1/completions", json=body) as reply:
        events = (line for line in reply.iter_lines() if line.startswith("data:"))
        for _ in range(ANSWER):
            next(events)
        return told_by(http)


@pytest.fixture(scope="module")
def seen() -> Iterator[Row]:
    """What clients were told, and what was told of them: at rest, amid an answer, after it."""
    with (
        Server(MODEL_PATH=str(fixture_dir("qwen3_vl")), **SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=WAIT_S_MAX) as http,
    ):
        talk = Talk(http)
        talk.of_all_kinds()
        server.wait_until_idle()
        told: Row = {"usages": talk.usages, "rest": told_by(http), "amid": amid_an_answer(http)}
        server.wait_until_idle()
        told |= {"after": told_by(http), "log": server.log.read_text().splitlines()}
        traces = (server.run_dir / "logs").rglob("*.log")
        told["trace"] = [row for path in traces for row in path.read_text().splitlines()]
        yield told


@pytest.fixture(scope="module")
def rest(seen: Row) -> Row:
    return dict(seen["rest"])


def test_prompts_count_by_how_they_matched_and_by_what_each_was_spared(
    seen: Row, rest: Row
) -> None:
    told = [usage["kv_cache"]["match"] for usage in seen["usages"]]
    # An answer stands behind what the second one goes on from, so that they part there.
    assert told[:5] == ["miss", "lcp", "supersequence", "lcp", "exact"]
    hand = Counter(told)
    assert hand["prefix"] == 2, "the second turns of both conversations"
    matches = rest["totals"]["matches"]
    assert {name: number for name, number in matches.items() if number} == hand
    for name, number in matches.items():
        assert total(rest["metrics"], "hearth_matches_total", match=name) == number
    assert [row["match"] for row in reversed(rest["recent"])] == told
    usages = seen["usages"]
    shares = [usage["kv_cache"]["prefix_length"] / usage["prompt_tokens"] for usage in usages]
    assert 0 < mean(shares) < 1
    assert rest["totals"]["match_share"] == pytest.approx(mean(shares))
    assert total(rest["metrics"], "hearth_match_ratio_sum") == pytest.approx(sum(shares))


def test_the_encoders_time_is_told_with_the_request_it_was_spent_for(seen: Row, rest: Row) -> None:
    told = [usage["kv_cache"].get("image_ms") for usage in seen["usages"]]
    first, second = (ms for ms in told if ms is not None)
    assert first > 0 == second, "the second turn's image was kept"
    assert [row["image_ms"] for row in reversed(rest["recent"])] == told
    assert rest["cache"]["vision"]["encoder_s"] * 1000 == pytest.approx(first, abs=1)
    name = "hearth_image_encoder_seconds"
    sums = [total(rest["metrics"], f"{name}_{of}") for of in ("sum", "count")]
    assert sums == [pytest.approx(first / 1000), 1]


def test_an_entry_tells_its_true_size_its_images_and_its_share_of_the_context(
    seen: Row, rest: Row
) -> None:
    entries, last = rest["cache"]["entries"], seen["usages"][-1]
    live = [entry for entry in entries if entry["slot_bytes"]]
    newest = next(entry for entry in live if entry["turns"] == 2 and not entry["images"])
    held = last["prompt_tokens"] + last["completion_tokens"]
    assert held - 1 <= newest["tokens"] <= held, "the last conversation is in its slot"
    assert newest["bytes"] == newest["slot_bytes"] == newest["tokens"] * ROW_BYTES
    kept = sum(entry["bytes"] - entry["slot_bytes"] for entry in entries)
    assert kept == rest["cache"]["bytes"] == total(rest["metrics"], "hearth_cache_bytes")
    slots = sum(slot["bytes"] for slot in rest["cache"]["slots"])
    assert slots == rest["cache"]["slots_bytes"] > 0
    for entry in entries:
        assert entry["context_share"] == entry["tokens"] / CONTEXT_TOKENS
        assert entry["model"] == "local" and entry["age_s"] >= entry["idle_s"]


def test_what_made_way_is_told_with_its_entry_and_adds_up(rest: Row) -> None:
    evicted = rest["cache"]["evicted"]
    count = sum(evicted["count"].values())
    assert count == rest["cache"]["evictions"] > 0
    assert count == total(rest["metrics"], "hearth_evictions_total")
    assert sum(sum(row["parts"].values()) for row in evicted["last"]) == count
    assert sum(row["bytes"] for row in evicted["last"]) == sum(evicted["bytes"].values()) > 0


def test_what_is_computed_in_and_the_bits_of_kv_are_told(rest: Row) -> None:
    dtype = {"name": "float32", "cast": False, "dense": False, "reason": "the weights are float32"}
    stored = {"bits": 8, "group_size": 32, "scheme": "uniform", "from_tokens": 256}
    assert rest["cache"]["dtype"] == dtype
    assert rest["cache"]["quantisation"] == {"live": None, "stored": stored, "ignored": {}}


def test_an_answer_that_is_written_is_told_with_its_speed_and_its_leaver_counts_once(
    seen: Row,
) -> None:
    (answer,) = seen["amid"]["cache"]["answers"]
    assert answer["completion_tokens"] > 16 and answer["tokens_per_s"] > 0
    names = ("hearth_answers_running", "hearth_answers_tokens_per_second")
    running, speed = (total(seen["amid"]["metrics"], name) for name in names)
    assert running == 1 and speed > 0
    after = seen["after"]
    assert after["cache"]["answers"] == [] and after["totals"]["disconnects"] == 1
    names = ("hearth_client_disconnects_total", "hearth_answers_running")
    assert [total(after["metrics"], name) for name in names] == [1, 0]


def test_the_three_counters_are_in_the_starts_line_each_requests_and_the_trace(seen: Row) -> None:
    nothing = " ".join(f"{name}=0" for name in COUNTERS)
    told = [line for line in seen["log"] if "finished request=" in line or "ready model=" in line]
    assert len(told) == len(seen["usages"]) + 2, "with the start's, and the one that was left"
    assert all(line.endswith(nothing) for line in told)
    assert len(seen["trace"]) == 4, "of the two conversations"
    assert all(f'"{name}":0' in row for name in COUNTERS for row in seen["trace"])
