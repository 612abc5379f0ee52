"""Follows simple operations without a model, for tests and measurements of the transport.

Started as `follower_main` is, with the same arguments.
"""

import os
import sys
import time
from typing import Any

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.worker.ranks.follower_main import run_follower
from hearth.worker.ranks.transport.follower_link import TransportFollowerLink


def follow(link: TransportFollowerLink, group: Any, settings: Settings) -> None:
    import mlx.core as mx

    while True:
        operation = link.next()
        if operation.name == "sum":
            link.witness("sum", *operation.arguments)
            mx.eval(mx.distributed.all_sum(mx.ones(operation.arguments[0]), group=group))
        elif operation.name == "witness":
            link.witness(*operation.arguments[0][link.rank])
        elif operation.name == "sleep":
            time.sleep(operation.arguments[0])
        elif operation.name == "event":
            link.send_event(*operation.arguments)
        elif operation.name == "cannot start":
            raise StartError(operation.arguments[0])
        elif operation.name == "break":
            raise ValueError("as told")
        elif operation.is_asked:
            link.answer([operation.name, *operation.arguments, link.rank, os.getpid()])


if __name__ == "__main__":
    code = run_follower(follow)
    sys.stderr.flush()
    os._exit(code)
