"""Kept KV expires branch by branch, and neither what is in use nor what is pinned."""

import math

from hearth.worker.cache.conversation_priority import SPONSOR_SILENT_S, LinePriority
from hearth.worker.cache.expiry import find_expired
from hearth.worker.cache.extent_store import Extent, ExtentStore
from scripts.harness.store_builders import every, keep, new_line, new_store, text

TTL_S = 100.0


def kept(store: ExtentStore, seed: int, used_at: float, length: int = 24) -> list[Extent]:
    """Keep a prompt, whose first 8 tokens all prompts share, for a line used at `used_at`."""
    line = new_line(seed, used_at)
    return keep(store, text(0, 8) + text(seed, length - 8), every(8, length + 1), line)


def expired(store: ExtentStore, now: float) -> tuple[Extent, ...]:
    return find_expired(store, (), now, TTL_S).extents


def test_a_line_that_waits_for_its_sub_agents_is_as_young_as_they_are() -> None:
    store = new_store()
    waiting = kept(store, 1, 0.0)
    agent = LinePriority(2, 0.0, 90.0, sponsor=waiting[0].line)
    keep(store, text(9, 16), every(8, 17), agent)
    assert expired(store, 100.0) == ()
    assert len(expired(store, 190.0)) == len(store)
    agent.is_running = True
    assert expired(store, SPONSOR_SILENT_S) == ()
    waits_no_more = find_expired(store, (), SPONSOR_SILENT_S + TTL_S, TTL_S)
    assert set(waits_no_more.extents) == set(waiting) and waits_no_more.next_at == math.inf
