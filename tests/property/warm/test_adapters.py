"""Random conversations whose requests name another adapter each time, warm against cold.

The cold model of an adapter is another one, in which mlx-lm itself has put it for good. Nothing is
resumed that requests of another adapter, or of none, have left.
"""

import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.worker.cache.block_hash import common_length, pack
from hearth.worker.schedule.answer_drafts import DraftPolicy
from scripts.harness.lora_files import ADAPTERS, adapted, adapted_machine, upstream_adapted
from scripts.harness.slow_properties import slow
from scripts.harness.socketless_worker import Answer, Machine, marks, vocabulary
from scripts.harness.warm.token_margins import same_bits, same_tokens
from scripts.harness.warm.warm_talks import OPERATIONS, TOKENS_MAX, Talk, play
from tests.helpers.by_day import by_day
from tests.helpers.models.oracle_drafts import OracleDrafts
from tests.helpers.worker.kv_prompts import follow, prompt

KINDS = ("qwen3", "qwen3_5", "gpt_oss", "gemma3_text", "falcon_h1", "qwen3_moe")


class SwitchingMachine(Machine):
    """Each request names an adapter of its own, or none."""

    chance = random.Random(0)

    def submit(self, ids: list[int], tokens_max: int = 8, *more: Any, **how: Any) -> Answer:
        how.setdefault("adapter", self.chance.choice(ADAPTERS))
        return super().submit(ids, tokens_max, *more, **how)


class SwitchingTalk(Talk):
    """Knows what requests of each adapter have computed, and its cold answers."""

    def __init__(self, name: str, **rules: Any) -> None:
        warm = SwitchingMachine(adapted(name), marks(name), vocabulary(name), **rules)
        super().__init__(name, warm, warm)
        exact = {"is_exact": rules.get("is_exact", False)}
        self.colds = {
            adapter: adapted_machine(name, upstream_adapted(name, adapter), keeps=False, **exact)
            for adapter in ADAPTERS
        }
        self.computed: dict[str, list[list[int]]] = defaultdict(list)
        self.resumed = 0
        self._of_adapter: dict[tuple[str, tuple[int, ...]], Answer] = {}

    def expected_with(self, adapter: str, ids: list[int]) -> Answer:
        key = adapter, tuple(ids)
        if key not in self._of_adapter:
            self._of_adapter[key] = self.colds[adapter].ask(ids, TOKENS_MAX)
        return self._of_adapter[key]

    def compare(self, answer: Answer, ids: list[int], is_exact: bool) -> None:
        adapter = answer.request.query.adapter
        cold = self.expected_with(adapter, ids)
        (same_bits if is_exact else same_tokens)(answer, cold)
        shared = [common_length(pack(ids), pack(other)) for other in self.computed[adapter]]
        assert answer.cached <= max(shared, default=0), "requests of another adapter have left it"
        self.resumed += answer.cached
        self.computed[adapter].append(ids + cold.tokens)


def talk_of(
    name: str, operations: list[tuple[str, int]], seed: int, *, is_exact: bool, **rules: Any
) -> SwitchingTalk:
    talk = SwitchingTalk(name, is_exact=is_exact, **rules)
    talk.warm.chance = random.Random(seed)
    # A prompt that was cancelled or wiped is asked with another adapter than it was read with.
    kept = [each for each in operations if each[0] not in ("cancel", "leave", "wipe")]
    play(talk, [*kept, ("again", 1), ("again", 1)], is_exact=is_exact, is_ample=False)
    return talk


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5",)))
@slow(3)
@given(
    operations=OPERATIONS,
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 4),
)
def test_in_exact_mode_each_adapter_says_what_its_own_model_says_to_the_bit(
    name: str, operations: list[tuple[str, int]], seed: int, slots: int
) -> None:
    talk_of(name, operations, seed, is_exact=True, slots_max=slots)


@pytest.mark.parametrize("name", by_day(["qwen3", "qwen3_5", "gpt_oss"], ("gpt_oss",)))
@slow(3)
@given(
    operations=OPERATIONS,
    seed=st.integers(0, 10**6),
)
def test_by_default_each_adapter_says_what_its_own_model_says(
    name: str, operations: list[tuple[str, int]], seed: int
) -> None:
    talk_of(name, operations, seed, is_exact=False)


@pytest.mark.parametrize("name", by_day(["qwen3", "qwen3_5"], ("qwen3_5",)))
def test_drafts_amid_a_conversation_that_switches_adapters_change_no_token(name: str) -> None:
    truth: dict[tuple[int, ...], list[int]] = {}
    drafts = OracleDrafts(lambda ids: truth[tuple(ids)], 0.25, [4, 0, 7])
    warm = adapted_machine(name, drafts=drafts)
    colds = {}
    for adapter in ADAPTERS:
        colds[adapter] = adapted_machine(name, upstream_adapted(name, adapter), keeps=False)
        colds[adapter].drafts.policy = DraftPolicy()
    ids, resumed = prompt(name, 90, 40), []
    for turn, adapter in enumerate(("", "one", "", "one", "turned", "two", "one")):
        theirs = colds[adapter].ask(ids, 30)
        truth[tuple(ids)] = theirs.tokens
        mine = warm.ask(ids, 30, adapter=adapter)
        same_tokens(mine, theirs)
        resumed.append(mine.cached > 0)
        warm.check()
        ids = follow(name, ids, theirs.tokens, 25, seed=turn)
    assert resumed == [False, False, True, True, False, False, True]
    assert drafts.accepted > 50
