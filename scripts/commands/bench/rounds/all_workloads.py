"""Lists every workload in the order in which a start plays them."""

from collections.abc import Sequence
from typing import Final

from hearth.commands.bench.workload import Workload
from hearth.commands.bench.workloads import beside_long, streams, structured
from hearth.commands.bench.workloads.counted_tokens import (
    cancelled,
    captured_sessions,
    forks_and_edits,
    shared_trunk,
)
from hearth.commands.bench.workloads.server_lives import (
    answers,
    at_rest,
    day_of_sessions,
    images,
    restarts,
)
from hearth.shared.errors import StartError

# `answers` asks what `linear` has asked, once more; `restart` stands before what reads anew, and
# `kill` behind it: what it reads last, the server has hardly the time to write.
ALL_WORKLOADS: Final[tuple[Workload, ...]] = (
    *(*captured_sessions.ALONE, *answers.WORKLOADS, *captured_sessions.SUB_AGENTS),
    *(*shared_trunk.WORKLOADS, *forks_and_edits.WORKLOADS, *cancelled.WORKLOADS),
    *(*captured_sessions.LIVE, *images.WORKLOADS, *at_rest.WORKLOADS),
    *(*restarts.WORKLOADS, *streams.WORKLOADS, *beside_long.WORKLOADS, *structured.WORKLOADS),
    *(*restarts.KILL_WORKLOADS, *day_of_sessions.WORKLOADS),
)
# What is asked again must have been read in the same visit.
_NEEDS: Final = {"restart": "answers", "kill": "before-kill"}


def chosen_workloads(names: Sequence[str], *, is_quick: bool) -> list[Workload]:
    """Return the workloads called `names` and what they need, in the order of all.

    Without names all, or all of a quick run.

    Raises:
        StartError: there is none of that name.
    """
    known = [workload.name for workload in ALL_WORKLOADS]
    if odd := sorted(set(names) - set(known)):
        raise StartError(f"No workload is called {', '.join(odd)}; there are {', '.join(known)}.")
    wanted = {*names, *(_NEEDS[name] for name in names if name in _NEEDS)}
    return [
        workload
        for workload in ALL_WORKLOADS
        if (workload.name in wanted if names else workload.is_quick or not is_quick)
    ]
