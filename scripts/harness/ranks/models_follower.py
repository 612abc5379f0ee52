"""Follows rank 0 through one model after another, or through sums without a model.

Started as `follower_main` is, with the same arguments. Between two models, each of which ends with
`stop`, it takes `model`: the directory of the next. All else is the worker's own follower. Of `sum`
it takes how many numbers are added up: for tests of how ranks are lost.
"""

import signal

if __name__ == "__main__":  # as in `follower_main`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import dataclasses
import itertools
import os
import sys
from typing import Any, Final

from hearth.shared.settings import Settings
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.follower_main import make_follower, run_follower

COMMAND: Final = (sys.executable, "-m", "scripts.harness.ranks.models_follower")
MODEL: Final = "model"
SUMS_BEFORE_NOISE: Final = 20


def follow(link: FollowerLink, group: Any, settings: Settings) -> None:
    """Do as told until rank 0 is gone."""
    import mlx.core as mx

    while True:
        operation = link.next()
        if operation.name == MODEL:
            follow_model(link, group, settings, *operation.arguments)
        else:
            (size,) = operation.arguments
            link.witness("sum", size)
            mx.eval(mx.distributed.all_sum(mx.ones(size), group=group))


def follow_model(
    link: FollowerLink, group: Any, settings: Settings, directory: str, adds_noise: bool
) -> None:
    """Do as told until the model's end; with noise this rank spoils one sum: a planted fault."""
    from hearth.worker.ranks.agreed_tokens import Sum, sum_over

    def noisy(group: Any) -> Sum:
        total, numbers = sum_over(group), itertools.count(1)
        return lambda array: total(array + 1 if next(numbers) == SUMS_BEFORE_NOISE else array)

    told = dataclasses.replace(settings, model_path=directory)
    make_follower(link, group, told, noisy if adds_noise else sum_over).run()
    link.answer(None)


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)
