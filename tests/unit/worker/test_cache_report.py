"""Checks the report of the cache against counts by hand: sizes, images, batches, bits, answers."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hearth.worker.cache import prefix_search
from hearth.worker.cache.prefix_search import ResumePlan
from hearth.worker.cache_report import (
    CORRECTNESS,
    cache_report,
    layer_counts,
    quantisation_report,
)
from hearth.worker.kv.kv_manager import NullKVManager
from hearth.worker.kv.quantise_kv import QuantFormat
from scripts.harness.socketless_worker import Machine, loaded, machine
from scripts.harness.vision_worker import LookingMachine, shown

PROMPT = [*range(100)]


def row_bytes(name: str, tiny: bool = True) -> int:
    """Return what K and V of one token take, from the model's own config."""
    config: dict[str, Any] = loaded(name, tiny=tiny).config
    layers = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(layers) * 2 * 4  # K and V, of float32


def report_of(made: Machine) -> dict[str, Any]:
    facts = loaded("qwen3", tiny=True).facts
    return cache_report(made.keeper, 0, "", facts, made.scheduler.decoder.batch_bytes)


def test_an_entry_has_the_size_of_its_rows_in_its_slot_and_what_two_share_counts_once() -> None:
    made = machine("qwen3", tiny=True)
    made.ask([*PROMPT, 7], 5)
    (entry,) = report_of(made)["entries"]
    assert 105 <= entry["tokens"] <= 106, "the answer's last token may not be fed"
    assert entry["slot_bytes"] == entry["bytes"] == entry["tokens"] * row_bytes("qwen3")
    facts = loaded("qwen3", tiny=True).facts
    assert entry["model"] == facts.name and entry["images"] == 0
    assert entry["context_share"] == entry["tokens"] / facts.context_tokens
    made.ask([*PROMPT[:70], *range(200, 240)], 2)
    report = report_of(made)
    kept = sum(entry["bytes"] - entry["slot_bytes"] for entry in report["entries"])
    assert kept == report["bytes"]
    tokens = sum(entry["own_tokens"] for entry in report["entries"])
    assert sum(entry["bytes"] for entry in report["entries"]) == tokens * row_bytes("qwen3")
    assert tokens < 2 * 64 + 2 * 50, "they share 64 tokens or more"


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_states_and_windows_that_are_kept_are_part_of_an_entry(name: str) -> None:
    made = machine(name, tiny=True)
    made.ask([*range(200)], 5)
    report = report_of(made)
    (entry,) = report["entries"]
    assert entry["bytes"] - entry["slot_bytes"] == report["bytes"] > 0
    assert entry["slot_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "beside", "evicted"),
    [("qwen3_5", "ArraysCache", 28), ("gpt_oss", "RotatingKVCache", 26)],
)
def test_each_class_of_layers_counts_what_its_own_parts_did(
    name: str, beside: str, evicted: int
) -> None:
    made = machine(name, tiny=True, slots_max=1)
    first, other = [*range(200)], [*range(300, 500)]
    for ids in (first, other):
        made.ask(ids, 2)
    before = {each: counts["restored"] for each, counts in layer_counts(made.keeper).items()}
    assert before == {beside: 0, "KVCache": 0}
    made.ask(first, 2)
    made.keeper.transfer.evictor.evicted = Counter(
        {"copy": 1, "window": 2, "snapshot": 4, "extent": 8, "expired": 16}
    )
    counts = layer_counts(made.keeper)
    assert [each["restored"] for each in counts.values()] == [1, 1]
    assert min(each["kept"] for each in counts.values()) > 0
    assert counts["KVCache"]["evicted"] == 25
    assert counts[beside]["evicted"] == evicted


def test_rows_in_a_batch_are_live_bytes_too() -> None:
    made = machine("qwen3", tiny=True)
    answers = [made.submit([*range(first, first + 100)], 40) for first in (0, 200)]
    made.run(until=lambda: bool(made.engine.decoder.batch_request_ids))
    report = report_of(made)
    batched = [slot for slot in report["slots"] if slot["batched"]]
    assert len(batched) == 2 and sum(slot["bytes"] for slot in report["slots"]) == 0
    assert report["slots_bytes"] == report["batch_bytes"] >= 2 * 100 * row_bytes("qwen3")
    made.run()
    assert all(answer.reason == "length" for answer in answers)
    report = report_of(made)
    assert report["batch_bytes"] == 0
    assert report["slots_bytes"] == sum(slot["bytes"] for slot in report["slots"]) > 0


def test_an_entry_counts_the_images_of_its_whole_prompt() -> None:
    name = "qwen3_vl"
    made = LookingMachine(name)
    trunk = [*range(70), *shown(name, 0), *range(70)]
    made.ask([*trunk, *range(100, 700)], 2)  # more than is shared: another conversation's
    made.ask([*trunk, *shown(name, 1), *range(300, 430)], 2)
    made.ask([*range(500, 580)], 2)
    entries = sorted(report_of(made)["entries"], key=lambda entry: int(entry["line"]))
    assert [entry["images"] for entry in entries] == [1, 2, 0]
    assert entries[1]["own_tokens"] < entries[1]["tokens"] - 70, "the trunk's image is another's"


def test_the_answers_that_are_written_are_told_to_their_key_alone() -> None:
    made = machine("qwen3", tiny=True)
    mine, theirs = (made.submit(PROMPT, 60, api_key=key) for key in ("mine", "theirs"))
    made.run(until=lambda: min(a.request.completion_tokens for a in (mine, theirs)) > 20)
    whole = made.scheduler.report()
    assert whole["answers_running"] == len(whole["answers"]) == 2
    speeds = [row["tokens_per_s"] for row in whole["answers"]]
    assert min(speeds) > 0 and whole["answers_tokens_per_s"] == pytest.approx(sum(speeds), abs=0.1)
    report = made.scheduler.report("mine")
    (row,) = report["answers"]
    assert row["request_id"] == mine.request.request_id
    assert row["completion_tokens"] == mine.request.completion_tokens
    assert report["answers_running"] == 2
    made.run()
    assert made.scheduler.report()["answers"] == []


def test_the_bits_of_kv_are_those_in_use_and_what_is_ignored_says_why() -> None:
    live, stored = QuantFormat(8, 32), QuantFormat(4, 64)
    made = machine(
        "qwen3", running_format=live, running_from=70, store_format=stored, store_from=256
    )
    packed = {"scheme": "uniform"}
    assert quantisation_report(made.keeper) == {
        "live": {"bits": 8, "group_size": 32, "from_tokens": 70} | packed,
        "stored": {"bits": 4, "group_size": 64, "from_tokens": 256} | packed,
        "ignored": {},
    }
    made.ask(PROMPT, 2)
    assert [slot["bits"] for slot in report_of(made)["slots"]] == [8]
    exact = machine("qwen3", is_exact=True, store_ignored="exact KV only")
    told = {"live": None, "stored": None, "ignored": {"CACHE_STORE_BITS": "exact KV only"}}
    assert quantisation_report(exact.keeper) == told
    assert quantisation_report(NullKVManager(list)) is None


def correctness(made: Machine) -> dict[str, int]:
    """Return which of the three counters have counted, and how much."""
    return {name: made.keeper.counts[name] for name in CORRECTNESS if made.keeper.counts[name]}


def test_a_request_that_goes_back_behind_an_image_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "qwen3_vl"
    made = LookingMachine(name, slots_max=1)
    prompt = [*range(70), *shown(name, 0), *range(70)]
    made.ask([*range(300, 380)], 2)
    assert correctness(made) == {}
    amid = replace(ResumePlan.cold(), position=71, matched=71, kind="prefix")
    monkeypatch.setattr(prefix_search, "choose_slot", lambda *_: amid)
    answer = made.ask(prompt, 2)
    assert answer.cached == 0 and answer.usage is not None and answer.usage.match == "miss"
    assert correctness(made) == {"vlm_retreat": 1}


def test_a_request_that_a_lost_state_sent_back_is_counted() -> None:
    made = machine("qwen3_5", tiny=True, slots_max=1)
    prompt = [*range(300)]
    made.ask(prompt, 2)
    made.ask([*range(400, 460)], 2)  # takes the slot
    nodes = [node for node in made.keeper.store.nodes if node.snapshot is not None]
    ours = [node for node in nodes if node.position > 64]
    for node in ours:
        made.keeper.store.set_snapshot(node, None)
    made.ask([*prompt, *range(500, 530)], 2)
    assert correctness(made) == {"hybrid_trim_miss": 1}
