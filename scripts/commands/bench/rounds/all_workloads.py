"""Lists every workload in the order in which a start plays them."""

from collections.abc import Sequence
from typing import Final

from hearth.commands.bench.workload import Workload
from hearth.commands.bench.workloads import beside_long, streams, structured
from hearth.commands.bench.workloads.counted_tokens import (
    cancelled,
    forks_and_edits,
    linear,
    live,
    shared_trunk,
    sub_agents,
)
from hearth.commands.bench.workloads.server_lives import (
    answers,
    at_rest,
    day_of_sessions,
    images,
    killed,
    restarted,
)
from hearth.shared.errors import StartError

# `answers` asks what `linear` has asked, once more; `restarted` stands before what reads anew, and
# `killed` behind it: what it reads last, the server has hardly the time to write.
_MODULES: Final = (
    *(linear, answers, sub_agents, shared_trunk, forks_and_edits, cancelled, live, images),
    *(at_rest, restarted, streams, beside_long, structured, killed, day_of_sessions),
)
# What is asked again must have been read in the same visit.
_NEEDS: Final = {"restart": "answers", "kill": "before-kill"}
ALL_WORKLOADS: Final[tuple[Workload, ...]] = tuple(
    workload for module in _MODULES for workload in module.WORKLOADS
)


def chosen_workloads(names: Sequence[str], *, is_quick: bool) -> list[Workload]:
    """Return the workloads called `names` and what they need, in the order of all.

    Without names all, or all of a quick run.

    Raises:
        StartError: there is none of that name.
    """
    known = [workload.name for workload in ALL_WORKLOADS]
    if odd := sorted(set(names) - set(known)):
        raise StartError(f"No workload is called {', '.join(odd)}; there are {', '.join(known)}.")
    if names:
        wanted = set(names)
        for _ in _NEEDS:  # what is needed may need another
            wanted |= {_NEEDS[name] for name in wanted if name in _NEEDS}
        return [workload for workload in ALL_WORKLOADS if workload.name in wanted]
    return [workload for workload in ALL_WORKLOADS if workload.is_quick or not is_quick]
