"""Replays rendered sessions on one layout on one Mac, and sums up what that cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean, median
from typing import Final

from hearth.shared.errors import StartError
from scripts.harness.layouts.counted_disk import Disk
from scripts.harness.layouts.counted_server import serving
from scripts.harness.layouts.counted_worker import CountedWorker
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript, ideals, line_count
from scripts.harness.mac.mac_hardware import Mac

QUIET_S: Final = 60.0  # behind a session
SHORT_TOKENS: Final = (64, 256)  # forwards below these are counted


@dataclass(slots=True)
class Figures:
    """What some sessions cost, in bytes and tokens. Sums of figures are figures."""

    rows_bytes: int = 0  # of each token that is new, once
    least_bytes: int = 0  # the same, and a state and a window for each conversation
    written: Counter[str] = field(default_factory=Counter)  # to SSD, by kind of record
    read: Counter[str] = field(default_factory=Counter)
    kept_bytes_max: int = 0
    slot_bytes_max: int = 0
    prefilled: int = 0
    ideal: int = 0
    idle: int = 0
    new: int = 0  # tokens: the ideal's and the answers'
    forwards: list[int] = field(default_factory=list)  # their tokens; of requests
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Figures") -> None:
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name.endswith("_max") else mine + theirs)

    @property
    def written_bytes(self) -> int:
        return self.written.total()

    @property
    def write_ratio(self) -> float:
        return self.written_bytes / self.rows_bytes if self.rows_bytes else 0.0

    @property
    def read_ratio(self) -> float:
        return self.prefilled / self.ideal if self.ideal else 0.0

    @property
    def forward_mean(self) -> float:
        return fmean(self.forwards) if self.forwards else 0.0

    @property
    def forward_median(self) -> float:
        return median(self.forwards) if self.forwards else 0.0

    def short_share(self, tokens: int) -> float:
        """Return the share of forwards of fewer than so many tokens."""
        short = sum(each < tokens for each in self.forwards)
        return short / len(self.forwards) if self.forwards else 0.0


@dataclass(slots=True)
class PairFigures:
    """What all sessions cost on one layout on one Mac, each on its own and together."""

    layout: ModelLayout
    mac: Mac
    budget_bytes: int
    chunk: int
    context_tokens: int
    sessions: dict[str, Figures] = field(default_factory=dict)

    def fits(self, figures: Figures) -> bool:
        """Whether RAM holds all that is kept of a session beside its live caches."""
        return figures.least_bytes <= self.budget_bytes

    @property
    def total(self) -> Figures:
        total = Figures()
        for figures in self.sessions.values():
            total.add(figures)
        return total


class _Meter:
    """Reads a worker's counters, and tells what they grew by."""

    def __init__(self, worker: CountedWorker, disk: Disk, layout: ModelLayout) -> None:
        self._worker, self._disk = worker, disk
        layers = layout.layers
        self._line_bytes = layers.state_bytes + layers.window_bytes(layers.layout.window)
        self._written, self._read = disk.written.copy(), disk.read.copy()
        self._ends, self._forwards = len(worker.ends), len(worker.engine.forwards)
        self._idle, self._refused = worker.scheduler.idle_tokens, worker.refused.copy()
        worker.kept_bytes_max = worker.slot_bytes_max = 0

    def figures(self, session: SessionScript, ideal: Sequence[int]) -> Figures:
        worker = self._worker
        ends = worker.ends[self._ends :]
        said = [session.turns[end.number].answer for end in ends if end.usage is not None]
        new = sum(ideal) + sum(map(len, said))
        forwards = worker.engine.forwards[self._forwards :]
        rows_bytes = new * worker.manager.row_bytes(None)
        lines = line_count(session, worker.context_tokens)
        return Figures(
            rows_bytes=rows_bytes,
            least_bytes=rows_bytes + lines * self._line_bytes,
            written=self._disk.written - self._written,
            read=self._disk.read - self._read,
            kept_bytes_max=worker.kept_bytes_max,
            slot_bytes_max=worker.slot_bytes_max,
            prefilled=sum(end.usage.prefilled_tokens for end in ends if end.usage is not None),
            ideal=sum(ideal),
            idle=worker.scheduler.idle_tokens - self._idle,
            new=new,
            forwards=[forward.tokens for forward in forwards if not forward.is_idle],
            refused=worker.refused - self._refused,
        )


def replay_pair(
    layout: ModelLayout,
    memory_gb: int,
    sessions: Sequence[SessionScript],
    settings: Mapping[str, str],
    pause_s: float = 0.0,
    is_apart: bool = True,
) -> PairFigures | None:
    """Play the sessions, each on a server of its own; None where the model does not fit.

    `pause_s` passes between a turn's end and the next one, beside what was captured. Where they are
    not apart one server plays them one after another.
    """
    pair: PairFigures | None = None
    for group in [[session] for session in sessions] if is_apart else [sessions]:
        with serving(layout, memory_gb, sessions[0].marks, settings) as server:
            try:
                worker = server.start()
            except StartError:
                return None
            if pair is None:
                budget = worker.manager.store.budget.bytes_max
                chunk, context = worker.rule.chunk, worker.context_tokens
                pair = PairFigures(layout, server.mac, budget, chunk, context)
            is_exact = worker.manager.rules.is_exact
            least_of = ideals(group, worker.context_tokens, is_exact)
            for session, least in zip(group, least_of, strict=True):
                meter = _Meter(worker, server.disk, layout)
                worker.play(session, pause_s, QUIET_S)
                pair.sessions[session.name] = meter.figures(session, least)
            worker.stop()
    return pair
