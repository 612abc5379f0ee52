"""Follows rank 0 through one model after another: a process that a whole test run shares.

Started as `follower_main` is, with the same arguments. `model` tells it which directory the next
`load` means; all else is the worker's own follower.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from hearth.shared.settings_from_env import Settings
from hearth.worker.engine.engine import leave_device
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.ranks.agreed_tokens import sum_over
from hearth.worker.ranks.follower import Follower
from hearth.worker.ranks.follower_main import run_follower
from hearth.worker.ranks.follower_setup import FollowerMemory
from hearth.worker.ranks.sharded_model import Sharded
from hearth.worker.ranks.transport.follower_link import TransportFollowerLink

MODEL = "model"


def follow(link: TransportFollowerLink, group: Any, settings: Settings) -> None:
    memory = FollowerMemory(settings, link)
    chosen = [settings.model_path]

    def choose(directory: str) -> None:
        chosen[0] = directory

    def load(dtype: str, _ranks_here: Sequence[int]) -> LoadedModel:
        part = Sharded(group, settings.rank_split, memory.admit)
        told = dataclasses.replace(settings, dtype=dtype, model_path=chosen[0])
        return load_model(told, part=part)

    follower = Follower(link, load, sum_over(group), memory)
    follower.operations[MODEL] = choose
    follower.run()
    leave_device()


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)
