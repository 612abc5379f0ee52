"""Plays a workload whose tokens are counted, and gathers what was measured of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Visit
from hearth.commands.bench.workloads.ask import ask_together, errors_of, request_values
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured


async def play_counted(
    visit: Visit,
    sessions: Sequence[Sequence[Captured]],
    *,
    tokens_max: int = 1,
    is_live: bool = False,
    is_serial: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Measured:
    """Ask `sessions` at once; what is read until the server rests is theirs."""
    async with measuring(visit) as taken:
        rows = await ask_together(
            visit,
            sessions,
            tokens_max=tokens_max,
            is_live=is_live,
            is_serial=is_serial,
            extra=extra,
        )
    return measured(rows, taken.values())


def measured(
    rows: Sequence[Row],
    taken: Mapping[str, float],
    *,
    before: Sequence[Row] = (),
    errors: Sequence[str] = (),
) -> Measured:
    """Return what requests and meters told; `before` are the rows that the ideal has seen too.

    Without a meter, what was read is what the server says of it.
    """
    values = request_values(rows, before)
    read = {"read_tokens": values["claimed_tokens"]}
    return Measured({**read, **values, **taken}, errors=(*errors_of(rows), *errors))
