"""Follows rank 0 through one model after another: a process that a whole run shares.

Started as `follower_main` is, with the same arguments. Between two models, each of which ends with
`stop`, it takes `model`: the directory of the next. All else is the worker's own follower.
"""

import dataclasses
import os
import sys
from typing import Any, Final

import mlx.core as mx

from hearth.shared.settings_from_env import Settings
from hearth.worker.engine.engine import leave_device
from hearth.worker.ranks.agreed_tokens import Sum, sum_over
from hearth.worker.ranks.follower_main import run_follower
from hearth.worker.ranks.follower_setup import make_follower
from hearth.worker.ranks.transport.follower_link import TransportFollowerLink

MODEL: Final = "model"
SUMS_BEFORE_NOISE: Final = 20


def follow(link: TransportFollowerLink, group: Any, settings: Settings) -> None:
    """Do as told until what is told is no model."""
    while (operation := link.next()).name == MODEL:
        directory, adds_noise = operation.arguments
        told = dataclasses.replace(settings, model_path=directory)
        make_follower(link, group, told, noisy if adds_noise else sum_over).run()
        link.answer(None)
    leave_device()


def noisy(group: mx.distributed.Group) -> Sum:
    """Return a sum to which this rank adds something of its own once: a planted fault."""
    total, count = sum_over(group), 0

    def summed(array: mx.array) -> mx.array:
        nonlocal count
        count += 1
        return total(array + 1 if count == SUMS_BEFORE_NOISE else array)

    return summed


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)
