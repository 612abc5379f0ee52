"""One answer goes through every kind of live cache between two steps, and says what it says alone.

Alone, on a trunk in a batch, alone again, packed, drafted for, beside others, alone: one worker, no
reload. Packing changes values, so that what it is compared with packs at the same token.
"""

import random
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from hearth.worker.kv.quantise_kv import QuantFormat
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.models.oracle_drafts import OracleDrafts

FORM = QuantFormat(8, 32)
COMMON, OWN, ANSWER = 1_100, 20, 48
PACKED_FROM = COMMON + OWN + 20
CLOSE = 1e-3  # of log probabilities
CHANCE = random.Random(3)
TRUNK = [CHANCE.randrange(20, 3000) for _ in range(COMMON)]
PROMPT, OTHER = ([*TRUNK, *(CHANCE.randrange(20, 3000) for _ in range(OWN))] for _ in range(2))
STRANGER = [CHANCE.randrange(20, 3000) for _ in range(90)]


class LateDrafts(OracleDrafts):
    """Drafts nothing before it is told to."""

    def __init__(self, lies: float) -> None:
        self.known: dict[tuple[int, ...], list[int]] = {}
        super().__init__(lambda ids: self.known.get(tuple(ids), ()), lies, (3, 1, 5))
        self.is_on = False

    def begin(self, request: Any) -> Any:
        drafter = super().begin(request)
        promising = drafter.is_promising
        drafter.is_promising = lambda: self.is_on and promising()
        return drafter


def made(drafts: LateDrafts, packed_from: int = PACKED_FROM) -> Machine:
    rules: dict[str, Any] = {"running_format": FORM, "running_from": packed_from}
    return machine("qwen3", tiny=True, chunk=512, slots_max=4, drafts=drafts, **rules)


@cache
def truth_of(packed_from: int = PACKED_FROM) -> Answer:
    """Return the answer of a worker in which nobody else is, and nothing is drafted."""
    return made(LateDrafts(0), packed_from).ask(PROMPT, ANSWER)


def truth() -> list[int]:
    return truth_of().tokens


def unlike(answer: Answer, other: Answer) -> float:
    """Return the largest difference of log probabilities that tokens were drawn by."""
    pairs = zip(answer.logits, other.logits, strict=True)
    return max(float(np.abs(one - beside).max()) for one, beside in pairs)


def steps(worker: Machine, count: int) -> None:
    for _ in range(count):
        worker.step()


def kinds(answer: Answer) -> set[str]:
    """Return of which classes the layers of its slot's own cache are; none while it is lent."""
    assert answer.request.slot is not None
    return {type(layer).__name__ for layer in answer.request.slot.cache}


def leave(worker: Machine, answer: Answer) -> None:
    answer.request.lease.is_cancelled = True
    worker.step()
    assert answer.reason == "cancelled"


@settings(max_examples=8)
@given(
    alone=st.integers(1, 4),
    together=st.integers(1, 5),
    lies=st.sampled_from([0.0, 0.25]),
)
def test_one_answer_goes_through_every_kind_of_cache(
    alone: int, together: int, lies: float
) -> None:
    drafts = LateDrafts(lies)
    drafts.known[tuple(PROMPT)] = truth()
    worker = made(drafts)
    decoder = worker.engine.decoder
    answer = worker.submit(PROMPT, ANSWER)
    request = answer.request
    worker.run(until=lambda: len(decoder) == 1)
    steps(worker, alone)
    assert kinds(answer) == {"KVCache"} and not decoder.batch_keys, "alone"

    other = worker.submit(OTHER, ANSWER)
    worker.run(until=lambda: request.request_id in decoder.trunks)
    steps(worker, together)
    assert len(decoder.trunks) == 2 and not kinds(answer), "on a trunk, in no slot"
    assert decoder.trunks_report()["spared_bytes"] > 0

    leave(worker, other)
    assert kinds(answer) == {"KVCache"} and decoder.batch_bytes == 0, "alone, and whole"
    assert len(request.sampled) + len(PROMPT) < PACKED_FROM

    worker.run(until=lambda: kinds(answer) == {"QuantizedKVCache"})
    assert not worker.scheduler.is_idle, "packed amid the answer"

    drafts.is_on = True
    before = request.drafted_tokens
    steps(worker, 2)
    assert request.drafted_tokens > before, "drafted for, in packed rows"

    stranger = worker.submit(STRANGER * 13, 4)
    worker.run(until=lambda: bool(decoder.batch_keys) or stranger.reason != "")
    assert decoder.batch_keys and not kinds(answer), "packed rows share a batch"
    worker.run(until=lambda: stranger.reason != "")
    assert kinds(answer) == {"QuantizedKVCache"} and not decoder.batch_keys, "alone again"

    worker.run()
    assert answer.reason == "length" and worker.settled(answer).tokens == truth()
    assert unlike(answer, truth_of()) < CLOSE
    assert decoder.batch_bytes == 0
    worker.check()


def test_what_packs_three_tokens_later_is_not_taken_for_the_same() -> None:
    assert unlike(truth_of(PACKED_FROM + 3), truth_of()) > 10 * CLOSE
