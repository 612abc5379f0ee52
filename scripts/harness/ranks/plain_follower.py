"""Follows sums without a model: for tests of how ranks are lost.

Started as `follower_main` is, with the same arguments.
"""

import os
import sys
from typing import Any

from hearth.shared.settings_from_env import Settings
from hearth.worker.ranks.follower_main import run_follower
from hearth.worker.ranks.transport.follower_link import TransportFollowerLink


def follow(link: TransportFollowerLink, group: Any, settings: Settings) -> None:
    import mlx.core as mx

    while True:
        (size,) = link.next().arguments
        link.witness("sum", size)
        mx.eval(mx.distributed.all_sum(mx.ones(size), group=group))


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)
