"""Replays rendered sessions on one layout on one Mac, and sums up what that cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add

from hearth.shared.errors import StartError
from scripts.harness.layouts.counted_disk import Disk
from scripts.harness.layouts.counted_engine import MACS, CountedEngine
from scripts.harness.layouts.counted_worker import CountedWorker, counted, settings_of
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript, ideals, line_count


@dataclass(slots=True)
class Figures:
    """What some sessions cost, in bytes and tokens."""

    rows_bytes: int  # of each token that is new, once
    least_bytes: int  # the same, and a state and a window for each conversation
    written: Counter[str]  # to SSD, by kind of record
    read: Counter[str]
    kept_bytes_max: int
    slot_bytes_max: int
    prefilled: int
    ideal: int
    idle: int
    new: int  # tokens: the ideal's and the answers'
    forwards: list[int]  # their tokens; of requests
    refused: Counter[str]

    @property
    def read_ratio(self) -> float:
        return self.prefilled / self.ideal if self.ideal else 0.0


@dataclass(slots=True)
class PairFigures:
    """What all sessions cost on one layout on one Mac, each on its own and together."""

    budget_bytes: int
    chunk: int
    sessions: dict[str, Figures] = field(default_factory=dict)

    @property
    def total(self) -> Figures:
        columns = {
            field.name: [getattr(each, field.name) for each in self.sessions.values()]
            for field in fields(Figures)
        }
        return Figures(
            **{
                name: max(column) if name.endswith("_max") else reduce(add, column)
                for name, column in columns.items()
            }
        )


def replay_pair(
    layout: ModelLayout,
    memory_gb: int,
    sessions: Sequence[SessionScript],
    settings: Mapping[str, str],
    pause_s: float = 0.0,
) -> PairFigures | None:
    """Play the sessions, each on a server of its own; None where the model does not fit.

    `pause_s` passes between a turn's end and the next one, beside what was captured.
    """
    mac, speed = MACS[memory_gb]
    pair: PairFigures | None = None
    for session in sessions:
        with counted(mac) as (clock, disk, directory):
            engine, made = CountedEngine(layout, speed, clock), settings_of(directory, settings)
            try:
                worker = CountedWorker(layout, clock, engine, made, session, pause_s)
            except StartError:
                return None
            pair = pair or PairFigures(worker.manager.store.budget.bytes_max, worker.rule.chunk)
            worker.play()
            pair.sessions[session.name] = _figures(worker, disk)
            worker.stop()
    return pair


def _figures(worker: CountedWorker, disk: Disk) -> Figures:
    """Return what a worker's session cost until now."""
    session, layers, context = worker.session, worker.layout.layers, worker.context_tokens
    ideal = sum(ideals(session, context, worker.manager.rules.is_exact))
    new = ideal + sum(len(session.turns[number].answer) for number in worker.answered)
    rows_bytes = new * worker.manager.row_bytes(None)
    line_bytes = layers.state_bytes + layers.window_bytes(layers.layout.window)
    return Figures(
        rows_bytes=rows_bytes,
        least_bytes=rows_bytes + line_count(session, context) * line_bytes,
        written=disk.written.copy(),
        read=disk.read.copy(),
        kept_bytes_max=worker.kept_bytes_max,
        slot_bytes_max=worker.slot_bytes_max,
        prefilled=sum(usage.prefilled_tokens for usage in worker.answered.values()),
        ideal=ideal,
        idle=worker.scheduler.idle_tokens,
        new=new,
        forwards=[tokens for tokens, is_idle in worker.engine.forwards if not is_idle],
        refused=worker.refused,
    )
