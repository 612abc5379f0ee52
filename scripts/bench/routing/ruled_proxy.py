"""Runs the server with a rule of `rules` in the place of its own: ruled_proxy RULE."""

import sys
from unittest import mock

from hearth.proxy import main as real
from scripts.bench.routing.rules import RULES

if __name__ == "__main__":
    with mock.patch.object(real, "CacheAffinity", RULES[sys.argv[1]]):
        real.end(real.main())
