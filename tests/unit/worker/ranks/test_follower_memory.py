"""How much of its machine's memory a follower may take."""

import pytest

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine import mlx_memory
from hearth.worker.ranks.follower_setup import FollowerMemory
from hearth.worker.ranks.rank_link import FollowerLink
from hearth.worker.setup import encoder_memory
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.setup.rank_setup import SingleRank

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
