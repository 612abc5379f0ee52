"""Random conversations whose requests ask for KV in other bits each time, warm against cold.

Each answer is the one of a cold cache of the same bits, and nothing is resumed that requests of
other bits have left.
"""

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.settings import KV_BITS
from hearth.worker.cache.block_hash import common_length, pack
from hearth.worker.kv.kv_transfer import IdleMode
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.schedule.answers.answer_drafts import DraftPolicy
from scripts.harness.socketless_worker import Answer, Machine, loaded, machine, marks, vocabulary
from scripts.harness.warm.token_margins import same_bits, same_tokens
from scripts.harness.warm.warm_talks import OPERATIONS, TOKENS_MAX, Talk, play, slow
from tests.helpers.models.oracle_drafts import OracleDrafts
from tests.helpers.worker.kv_prompts import follow, prompt

BITS = (None, *KV_BITS)


class SwitchingMachine(Machine):
    """Each request asks for bits of its own. In exact mode too: there equality is to the bit."""

    chance = random.Random(0)

    def submit(self, ids: list[int], tokens_max: int = 8, *more: Any, **how: Any) -> Answer:
        self.requested_bits.never = ""
        how.setdefault("kv_bits", self.chance.choice(BITS))
        return super().submit(ids, tokens_max, *more, **how)


class SwitchingTalk(Talk):
    """Knows what requests of each of the bits have computed, and the cold answer in these bits."""

    def __init__(self, name: str, **rules: Any) -> None:
        made = (loaded(name), marks(name), vocabulary(name))
        super().__init__(name, SwitchingMachine(*made, **rules), SwitchingMachine(*made, **rules))
        self.computed: dict[int | None, list[list[int]]] = defaultdict(list)
        self.resumed = 0
        self._of_bits: dict[tuple[int | None, tuple[int, ...]], Answer] = {}

    def expected_in(self, bits: int | None, ids: list[int]) -> Answer:
        key = bits, tuple(ids)
        if key not in self._of_bits:
            how = {"kv_bits": bits, "uses_cache": False}
            self._of_bits[key] = self.cold.ask(ids, TOKENS_MAX, **how)
        return self._of_bits[key]

    def compare(self, answer: Answer, ids: list[int], is_exact: bool) -> None:
        bits = answer.request.query.kv_bits
        cold = self.expected_in(bits, ids)
        same_bits(answer, cold)
        shared = [common_length(pack(ids), pack(other)) for other in self.computed[bits]]
        assert answer.cached <= max(shared, default=0), "requests of other bits have left it"
        self.resumed += answer.cached
        self.computed[bits].append(ids + cold.tokens)


@pytest.mark.parametrize("own", [None, 8])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@slow(3)
@given(
    operations=OPERATIONS,
    seed=st.integers(0, 10**6),
    start=st.sampled_from([0, 100, 200]),
    mode=st.sampled_from([IdleMode.AUTO]),
    slots=st.integers(1, 4),
)
def test_requests_of_any_bits_say_what_a_cold_cache_of_these_bits_says(
    name: str,
    own: int | None,
    operations: list[tuple[str, int]],
    seed: int,
    start: int,
    mode: IdleMode,
    slots: int,
) -> None:
    form = QuantFormat(own, 64) if own is not None else None
    rules = {"running_from": start, "running_format": form, "idle_prefill": mode}
    talk = SwitchingTalk(name, is_exact=True, slots_max=slots, **rules)
    talk.warm.chance = random.Random(seed)
    # A prompt that was cancelled or wiped is asked in other bits than the ones it was read in.
    kept = [each for each in operations if each[0] not in ("cancel", "leave", "wipe")]
    play(talk, [*kept, ("again", 1), ("again", 1)], is_exact=True, is_ample=False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_drafts_amid_a_conversation_that_switches_bits_change_no_token(name: str) -> None:
    cold = machine(name, running_from=150)
    cold.drafts.policy = DraftPolicy()
    truth: dict[tuple[int, ...], list[int]] = {}
    drafts = OracleDrafts(lambda ids: truth[tuple(ids)], 0.25, [4, 0, 7])
    warm = machine(name, running_from=150, drafts=drafts)
    ids, resumed = prompt(name, 90, 40), []
    for turn, bits in enumerate((None, 8, None, 8, 0, 4, 8)):
        theirs = cold.ask(ids, 30, kv_bits=bits, uses_cache=False)
        truth[tuple(ids)] = theirs.tokens
        mine = warm.ask(ids, 30, kv_bits=bits)
        same_tokens(mine, theirs)
        resumed.append(mine.cached > 0)
        warm.check()
        ids = follow(name, ids, theirs.tokens, 25, seed=turn)
    assert resumed == [False, False, True, True, True, False, True]
    assert drafts.accepted > 50
