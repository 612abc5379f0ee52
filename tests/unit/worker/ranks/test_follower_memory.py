"""A follower takes its part of its machine's memory, and tells rank 0 what is left of that."""

import dataclasses
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.ranks.follower import Follower, FollowerMemory
from hearth.worker.ranks.transport.follower_link import FollowerLink
from hearth.worker.setup import encoder_memory
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.setup.rank_setup import SingleRank
from scripts.harness.socketless_worker import loaded

MB = mlx_memory.MB
ENCODERS = 300 * MB


class TwoHere(SingleRank):
    ranks_here = 2


def test_a_follower_leaves_room_for_what_embeds_as_rank_0_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    monkeypatch.setattr(mlx_memory, "hold_memory", held.append)
    monkeypatch.setattr(encoder_memory, "encoders_bytes", lambda _settings: ENCODERS)
    monkeypatch.setattr("hearth.worker.setup.memory_setup.encoders_bytes", lambda _: ENCODERS)
    settings = load_settings({"RANKS": "2", "MEMORY_LIMIT_MB": "1500"}, None)
    link: FollowerLink = None  # type: ignore[assignment]  # what it tells is not of interest
    memory = FollowerMemory(settings, link)
    memory.share(2)
    assert held == [(1500 * MB - ENCODERS) // 2]
    assert memory.room()[0] == WorkerMemory(settings, "ipc:///nowhere/w", TwoHere()).share.total


class Rooms:
    """A link that keeps what it is given to tell."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def set_room(self, limit_bytes: int, used_bytes: int) -> None:
        self.told.append((limit_bytes, used_bytes))


def test_what_is_given_up_is_told_though_the_last_look_was_just_now() -> None:
    """Rank 0 may have nothing to tell, and wait for this memory, from then on."""
    link: Any = Rooms()
    memory = FollowerMemory(load_settings({"RANKS": "2"}, None), link)
    memory.measure()
    memory.measure()
    assert len(link.told) == 1, "looks between operations are half a second apart"
    loads: Any = None
    follower = Follower(link, loads, loads, memory, loads)
    follower.operations["release_memory"]()
    assert len(link.told) == 2


def test_ranks_too_small_for_a_context_are_not_told_to_set_what_they_cannot_have() -> None:
    settings = load_settings({"RANKS": "2", "MEMORY_LIMIT_MB": "200"}, None)
    memory = WorkerMemory(settings, "ipc:///nowhere/w", TwoHere())
    model = loaded("qwen3", tiny=True)
    over_two = dataclasses.replace(model, facts=dataclasses.replace(model.facts, ranks=2))
    with pytest.raises(StartError, match=r"GB over 2 ranks\) .* set more RANKS or") as caught:
        memory.fit(over_two, lambda tokens: tokens << 30, ForwardMemory())
    assert "KV_BITS" not in str(caught.value)
