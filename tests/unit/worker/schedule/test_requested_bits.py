"""A request has its KV in the bits that it asks for, or is told why it cannot."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.settings import KV_BITS
from hearth.worker.cache.block_hash import key_root
from hearth.worker.cache_report import cache_report
from hearth.worker.draft.draft_memory import DraftMemory
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.schedule.answers.answer_drafts import DraftPolicy
from hearth.worker.schedule.memory_guard import MemoryGuard, PromptCost
from hearth.worker.schedule.requested_bits import RequestedBits, roots_of
from hearth.worker.setup.requested_bits_setup import make_requested_bits
from scripts.harness.socketless_worker import Answer, Machine, machine
from scripts.harness.store_builders import ROOT
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.disk_workers import Workers
from tests.helpers.worker.kv_prompts import prompt

BITS = (None, *KV_BITS)
EIGHT: dict[str, Any] = {"running_format": QuantFormat(8, 64)}


def rules(**more: Any) -> KeepRules:
    return KeepRules(slots_max=4, chunk=64, is_exact=False, **more)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.kill()


def asked(warm: Machine, bits: int | None, ids: list[int], **how: Any) -> Answer:
    return warm.ask(ids, kv_bits=bits, **how)


def formats(warm: Machine) -> dict[int | None, QuantFormat | None]:
    return {slot.kv_bits: slot.format for slot in warm.keeper.slots}


# ------------------------------------------------------------ which root


def test_who_asks_for_the_servers_bits_shares_what_everybody_has() -> None:
    assert [RequestedBits(rules()).asked(bits) for bits in BITS] == [None, None, 4, 8]
    eight = RequestedBits(rules(**EIGHT))
    assert [eight.asked(bits) for bits in BITS] == [None, 0, 4, None]


def test_all_that_decides_what_rows_are_has_a_root_of_its_own() -> None:
    roots = [
        RequestedBits(rules(group_size=size)).root(root, bits)
        for root in (ROOT, key_root(ROOT, "mine"), key_root(ROOT, "theirs"))
        for size in (32, 64)
        for bits in (4, 8)
    ]
    raw = {RequestedBits(rules(group_size=size)).root(ROOT, 0) for size in (32, 64)}
    assert len({*roots, *raw, ROOT}) == len(roots) + 2, "raw rows have no groups"
    assert RequestedBits(rules()).root(ROOT, None) == ROOT


def test_the_roots_of_a_key_are_those_that_its_requests_may_have() -> None:
    for own in ({}, EIGHT):
        bits = RequestedBits(rules(**own))
        assert {bits.root(ROOT, bits.asked(each)) for each in BITS} == {
            *roots_of(rules(**own), ROOT)
        }


# ------------------------------------------------------------ whether a model takes them


def test_what_is_refused_is_told_with_its_reason_and_its_remedy() -> None:
    bits = RequestedBits(rules(**EIGHT), never="no rows are packed")
    with pytest.raises(RequestError, match=r"no rows are packed.* set it to 8") as caught:
        bits.asked(4)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "kv_bits_refused", "kv_bits")
    assert [bits.asked(0), bits.asked(8)] == [0, None], "what needs no packing is never refused"


def test_a_model_is_tried_once_for_each_of_the_bits_and_when_they_are_asked_for() -> None:
    tried: list[QuantFormat | None] = []

    def why_not(form: QuantFormat | None) -> str | None:
        tried.append(form)
        return "it broke" if form == QuantFormat(4, 32) else None

    bits = RequestedBits(rules(group_size=32), why_not)
    assert bits.asked(4) == 4 and not tried, "the prompt threads try nothing"
    for each in (None, 8, 8):
        bits.try_out(each)
    for _ in range(2):
        with pytest.raises(RequestError, match="it broke"):
            bits.try_out(4)
    assert tried == [QuantFormat(8, 32), QuantFormat(4, 32)]
    with pytest.raises(RequestError, match="it broke"):
        bits.asked(4)


def test_exact_mode_packs_nothing_for_one_request() -> None:
    exact = machine("qwen3", is_exact=True)
    with pytest.raises(RequestError, match="CACHE_EXACT=false"):
        exact.ask(prompt("qwen3", 40, 20), kv_bits=4)
    assert exact.ask(prompt("qwen3", 40, 20), kv_bits=0).reason == "length"


def test_a_model_whose_layers_nobody_knows_packs_nothing() -> None:
    bare = machine("qwen3", keeps=False)
    with pytest.raises(RequestError, match="not known here"):
        bare.ask(prompt("qwen3", 40, 20), kv_bits=8)


def test_a_window_model_refuses_and_an_answer_amid_its_words_does_not_notice() -> None:
    ids = prompt("gpt_oss", 150, 100)
    warm, alone = machine("gpt_oss"), machine("gpt_oss").ask(ids, 12)
    first = warm.submit(ids, 12)
    warm.run(until=lambda: first.request.completion_tokens > 3)
    refused = warm.submit(prompt("gpt_oss", 60), kv_bits=4)
    assert "RotatingKVCache" in refused.reason and "Leave kv_bits out" in refused.reason
    warm.run()
    same_tokens(warm.settled(first), alone)
    assert len(warm.keeper.slots) == 1 and refused.usage is None
    warm.check()


def test_rows_that_cannot_share_a_forward_are_refused_where_answers_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm = machine("qwen3")
    monkeypatch.setattr(warm.engine, "batches_packed", lambda *_: False)
    assert "share forwards" in warm.ask(prompt("qwen3", 40, 20), kv_bits=4).reason
    monkeypatch.setattr(warm.engine.decoder, "is_mergeable", False)
    turns = make_requested_bits(warm.engine, warm.keeper)
    turns.try_out(4)
    assert turns.asked(4) == 4


# ------------------------------------------------------------ what is computed and kept


def test_requests_of_other_bits_share_nothing_and_each_has_its_cold_answer() -> None:
    warm, ids = machine("qwen3", running_from=100), prompt("qwen3", 150, 100)
    for bits in (None, 4, 8):
        first, again = asked(warm, bits, ids), asked(warm, bits, ids)
        cold = asked(warm, bits, ids, uses_cache=False)
        assert (first.cached, again.cached) == (0, again.request.query.limit), bits
        for mine, other, theirs in zip(first.logits, again.logits, cold.logits, strict=True):
            assert np.array_equal(mine, theirs), bits
            assert np.abs(other - theirs).max() < 1e-4, bits
        warm.check()
    assert formats(warm) == {None: None, 4: QuantFormat(4, 64), 8: QuantFormat(8, 64)}
    assert asked(warm, 0, ids).cached > 0, "raw, as the server has it"


def test_a_request_may_have_raw_rows_where_the_server_packs_them() -> None:
    packed, raw = machine("qwen3", **EIGHT), machine("qwen3")
    ids = prompt("qwen3", 150, 100)
    packed.ask(ids)
    mine, theirs = asked(packed, 0, ids), raw.ask(ids)
    assert mine.cached == 0
    for one, other in zip(mine.logits, theirs.logits, strict=True):
        assert np.array_equal(one, other)
    assert formats(packed) == {None: EIGHT["running_format"], 0: None}
    assert packed.engine.decoder.cost.row_bytes == packed.layers.row_bytes, "padding is as wide"


def test_rows_are_packed_from_where_the_server_packs_them() -> None:
    warm = machine("qwen3", running_from=300)
    ids = prompt("qwen3", 150, 60)
    asked(warm, 4, ids)
    assert formats(warm) == {4: None}
    asked(warm, 4, ids, tokens_max=100)
    assert formats(warm) == {4: QuantFormat(4, 64)}


def test_answers_share_a_forward_with_those_of_the_same_bits_alone() -> None:
    warm = machine("qwen3", running_max=4)
    ids = [prompt("qwen3", 80, 40, seed=seed) for seed in range(4)]
    bits = (4, None, 4, 8)
    alone = [
        asked(machine("qwen3"), each, one, tokens_max=40)
        for each, one in zip(bits, ids, strict=True)
    ]
    answers = [warm.submit(one, 40, kv_bits=each) for each, one in zip(bits, ids, strict=True)]
    warm.run(until=lambda: all(each.request.completion_tokens > 4 for each in answers))
    of = {answer.request.request_id: each for each, answer in zip(bits, answers, strict=True)}
    assert [{of[key] for key in keys} for keys in warm.engine.decoder.batch_keys] == [{4}]
    warm.run()
    for answer, other in zip(answers, alone, strict=True):
        same_tokens(warm.settled(answer), other)


def test_a_slot_is_admitted_at_what_its_bits_take() -> None:
    warm, rows = machine("qwen3"), 512
    for bits in (None, 4, 8):
        query = warm.submit(prompt("qwen3", 150, 100), 2, kv_bits=bits).request.query
        wanted = warm.keeper.slot_cost(query, rows)
        uncached = warm.keeper.uncached
        assert uncached.slot_cost(query, rows) == uncached.cold_bytes(rows, bits) == wanted
        slot, _ = warm.keeper.open(query, rows)
        assert warm.keeper.slot_bytes(slot) == wanted, bits
        warm.keeper.close(slot, slot.cache, slot.tokens, is_prefilled=False)
        warm.run()


class CostSpy(MemoryGuard):
    """Remembers what each prompt was thought to take."""

    costs: ClassVar[list[PromptCost]] = []

    def admits(self, manager: Any, query: Any, cost: PromptCost, *more: Any) -> tuple[bool, int]:
        self.costs.append(cost)
        return MemoryGuard.admits(self, manager, query, cost, *more)


def test_an_answer_is_thought_to_grow_by_rows_of_its_bits() -> None:
    growths = []
    for bits in (None, 8, 4):
        warm = machine("qwen3", memory=CostSpy())
        first = warm.submit(prompt("qwen3", 40, 20), 3)
        warm.run(until=lambda first=first: first.request.completion_tokens > 0)
        warm.submit(prompt("qwen3", 40, 20, seed=1), 2_000, kv_bits=bits)
        warm.step()
        growths.append(CostSpy.costs[-1].growth)
    assert growths[0] > 1.5 * growths[1] > 2 * growths[2] > 0


def test_drafts_have_branches_behind_raw_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = machine("qwen3")
    told = [warm.submit(prompt("qwen3", 40, 20), kv_bits=bits).request for bits in BITS]
    warm.drafts.policy = DraftPolicy("lookup", "all", "all", takes_trees=True)
    monkeypatch.setattr(DraftMemory, "begin", lambda *_, allows_trees: allows_trees)
    assert [warm.drafts.begin(request) for request in told] == [True, True, False, False]


def test_a_conversation_is_found_on_disk_by_requests_of_its_bits_alone(workers: Workers) -> None:
    ids = prompt("qwen3", 150, 100)
    first = workers.start("qwen3")
    cold = {bits: asked(first, bits, ids) for bits in (4, None)}
    workers.flush()
    later = workers.start("qwen3")
    assert asked(later, 8, ids).cached == 0
    for bits, before in cold.items():
        again = asked(later, bits, ids)
        assert again.usage is not None
        assert (again.cached, again.usage.source) == (again.request.query.limit, "ssd"), bits
        same_tokens(again, before)
    counts = later.keeper.disk_report()["counts"]
    assert not {"recalls_unreadable", "recalled_packed_tokens"} & counts.keys(), "none is foreign"


def test_a_keys_report_tells_of_all_its_bits() -> None:
    warm = machine("qwen3")
    for key, bits in (("mine", None), ("mine", 8), ("theirs", 8), ("theirs", 4)):
        asked(warm, bits, prompt("qwen3", 150, 100), root=key_root(ROOT, key))
    report = cache_report(warm.keeper, 0, "mine")
    assert (len(report["slots"]), len(report["entries"])) == (2, 2)
    assert len(cache_report(warm.keeper, 0)["slots"]) == 4
