"""Runs the server with a rule of `rules` in the place of its own: ruled_proxy RULE WORKER.

WORKER is the module that runs its workers: QUICK_DISK, or their own.
"""

import sys
from unittest import mock

from hearth.proxy import main as real
from scripts.bench.routing.rules import RULES

if __name__ == "__main__":
    with mock.patch.object(real, "CacheAffinity", RULES[sys.argv[1]]):
        real.end(real.main((sys.executable, "-m", sys.argv[2])))
