"""Plays a session in which the server's own answers are sent back, as a real agent would."""

from typing import Final

from hearth.commands.bench.results import HEARTH
from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens.counted import play_counted
from hearth.commands.bench.workloads.counted_tokens.linear import CHAT
from hearth.commands.bench.workloads.sessions import session

NAME: Final = "live"
# The meter takes a forward that verifies drafts for reading: nothing is drafted here. The others
# draft only when they are told to, but for Rapid-MLX on a few models with MTP heads that it knows.
NO_DRAFTS: Final = {"speculate": False}


async def _run(visit: Visit) -> Measured:
    return await play_counted(
        visit,
        [session(CHAT, visit, NAME)],
        tokens_max=visit.scale.answer_tokens,
        is_live=True,
        is_serial=True,
        extra=NO_DRAFTS if visit.server.name == HEARTH else {},
    )


def _tokens(scale: Scale) -> int:
    return {"quick": 4_300, "full": 8_500}.get(scale.name, 60_000)


WORKLOADS: Final = (
    Workload(
        NAME,
        "The session of `linear` again, with the server's own longer answers sent back. What a "
        "server verifies of drafts is counted as read: Hearth drafts nothing here.",
        Start.FRESH,
        _run,
        read_tokens=_tokens,
    ),
)
