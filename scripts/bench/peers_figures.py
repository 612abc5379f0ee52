"""Holds the measurements of one server on one trace, and derives hit rates from them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hearth.commands.replay.ideal_cache import ideal_cached, percentile
from hearth.commands.replay.player import Row

WHOLE_SHARE = 0.98  # of a prompt: a token or two that are read alone are not counted


@dataclass(frozen=True, slots=True)
class Step:
    """One request of the replay. Tokens; None where that is not known."""

    prompt: int
    claimed: int  # cached, as the server says
    prefilled: int
    ideal: int | None  # what had to be prefilled
    ideal_prompt: int | None  # how long it is as Hearth builds it
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Probe:
    """What was read for a prompt, or for several, and how soon the answer began."""

    prompt: int
    prefilled: int
    ttft_s: float | None
    ideal: int | None = None

    @property
    def hit(self) -> float:
        return hit_of(self.prompt, self.prefilled)


@dataclass(frozen=True, slots=True)
class Figures:
    """All about one server on one model and trace; None where it could not be measured."""

    side: str
    fixture: str
    trace: str
    limit: int  # requests sent
    command: str  # that makes this row
    server_command: str
    version: str
    machine: str
    commit: str
    started: str
    load: float  # of the machine, one minute, at the start
    steps: tuple[Step, ...] = ()  # those answered
    refused: int = 0  # with a 4xx
    failed: int = 0  # otherwise
    is_metered: bool = False  # prefilled tokens are counted, not claimed
    live: Probe | None = None
    after_cancel: Probe | None = None
    after_restart: Probe | None = None
    cold_ttft_p50_s: float | None = None
    decode_tok_s: float | None = None
    memory_mb: float | None = None
    compared: int = 0  # answers, with those of the cache switched off
    equal: int = 0
    errors: tuple[str, ...] = field(default=())

    @property
    def key(self) -> tuple[str, str, str]:
        return self.fixture, self.trace, self.side

    @property
    def prompt(self) -> int:
        return sum(step.prompt for step in self.steps)

    @property
    def prefilled(self) -> int | None:
        return sum(step.prefilled for step in self.steps) if self.steps else None

    @property
    def hit(self) -> float | None:
        return hit_of(self.prompt, self.prefilled or 0) if self.steps else None

    @property
    def claimed_hit(self) -> float | None:
        return sum(step.claimed for step in self.steps) / self.prompt if self.steps else None

    @property
    def ideal(self) -> int | None:
        """Return what had to be prefilled of the prompts that were answered."""
        known = [step.ideal for step in self.steps if step.ideal is not None]
        return sum(known) if known and len(known) == len(self.steps) else None

    @property
    def ideal_hit(self) -> float | None:
        if self.ideal is None:
            return None
        return hit_of(sum(step.ideal_prompt or 0 for step in self.steps), self.ideal)

    @property
    def over_ideal(self) -> float | None:
        return self.prefilled / self.ideal if self.prefilled is not None and self.ideal else None

    @property
    def prefilled_p50(self) -> float | None:
        return percentile([step.prefilled for step in self.steps], 0.5)

    @property
    def equal_rate(self) -> float | None:
        return self.equal / self.compared if self.compared else None

    def ttft_s(self, share: float) -> float | None:
        return percentile([s.ttft_s for s in self.steps if s.ttft_s is not None], share)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Figures":
        """Return what `as_json` told."""
        probes = {
            name: Probe(**row[name]) if row[name] else None
            for name in ("live", "after_cancel", "after_restart")
        }
        steps = tuple(Step(**step) for step in row["steps"])
        return cls(**{**row, **probes, "steps": steps, "errors": tuple(row["errors"])})


def hit_of(prompt: int, prefilled: int) -> float:
    """Return the share of `prompt` that was not read; 0 where even more was."""
    return max(0.0, 1 - prefilled / prompt) if prompt else 0.0


def steps_of(rows: Sequence[Row]) -> tuple[Step, ...]:
    """Return the answered ones of `rows`, each held to the ideal of its ids where it has some."""
    steps = []
    for row, cached in zip(rows, ideal_cached([row.ids for row in rows]), strict=True):
        if row.tokens is None:
            continue
        length = None if row.ids is None else len(row.ids)
        ideal = None if length is None or cached is None else length - cached
        told = row.tokens
        steps.append(
            Step(told.prompt, told.cached, told.prefilled, ideal, length, row.outcome.ttft_s)
        )
    return tuple(steps)


def same_answers(warm: Sequence[Row], cold: Sequence[Row]) -> tuple[int, int]:
    """Return how many answers are the same with and without the cache, and of how many.

    An answer of `cold` whose prompt was not read whole after all is no measure, and left out.
    """
    pairs = [
        (said(one), said(other))
        for one, other in zip(warm, cold, strict=True)
        if one.tokens is not None
        and other.tokens is not None
        and other.tokens.prefilled > other.tokens.prompt * WHOLE_SHARE
    ]
    return sum(one == other for one, other in pairs), len(pairs)


def said(row: Row) -> tuple[str, str]:
    return "".join(row.outcome.reading.reasoning), "".join(row.outcome.reading.text)
