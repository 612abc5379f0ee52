"""Holds what checks share: the model, the canary, the time that is left, what was found so far."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hearth.worker.cache.block_hash import PrefixHash, root_hash
from hearth.worker.doctor.canary import Canary
from hearth.worker.doctor.checked_machine import weights_dtype
from hearth.worker.doctor.findings import CheckResult, Figure, Verdict
from hearth.worker.doctor.upstream_forwards import Answer
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache
from hearth.worker.prompt.prefill_cuts import CutRule

SECONDS_MAX: Final = 170.0  # of computing, of the three minutes in which all has to be over
FORWARD_S_MAX: Final = 2.0  # a request waits for one forward, and a display for the GPU
FORWARD_TOKENS_MAX: Final = 2048
DEPTH_MIN: Final = 320  # tokens of the canary's last prompt, on the slowest machine ...
DEPTH_MAX: Final = 4096  # ... and on a fast one
ROOT: Final[PrefixHash] = root_hash(["doctor"])

Steps = Generator[None, None, None]  # yields between forwards, so that it can be dropped there


class LeftOut(Exception):
    """A check cannot be made here; says why."""


@dataclass(frozen=True, slots=True)
class CheckRules:
    """What the checks may take. Immutable."""

    default_chunk: int  # prompt tokens of one forward, where nothing else is set or found
    seconds_max: float = SECONDS_MAX
    depth_max: int = DEPTH_MAX
    answer_tokens: int = 16
    ssd_directory: Path | None = None  # KV_CACHE_DIR; None = nothing is written
    ssd_bytes: int = 256 << 20
    ssd_bytes_per_day: int = 0  # all that is written to it; 0 = no limit


@dataclass
class CheckContext:
    """One run of the checks. Owner: the inference thread.

    Invariant: it holds no KV between two checks: what stays of one are figures and answers.
    """

    loaded: LoadedModel
    engine: Engine  # of the checks' own: its decoder is nobody else's
    rule: CutRule
    rules: CheckRules
    room: Callable[[], int]  # bytes that may be taken now
    clock: Callable[[], float] = time.perf_counter
    results: dict[str, CheckResult] = field(default_factory=dict)
    spent_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_s: float = 0.0  # of one token alone
    canary: Canary | None = None
    cold: list[Answer] = field(default_factory=list)  # to each of the canary's prompts
    stage: str = ""  # the check that is running
    stage_began_s: float = 0.0

    def __post_init__(self) -> None:
        self.dtype = weights_dtype(self.loaded)
        self.model: Any = self.loaded.model

    @property
    def left_s(self) -> float:
        return self.rules.seconds_max - self.spent_s

    @property
    def forward_tokens_max(self) -> int:
        """Tokens of the longest forward that a request, or a Mac's display, may have to wait for.

        Half of what the rate allows, which was measured where attention looks back on little.
        """
        by_rate = int(self.prefill_tokens_per_s * FORWARD_S_MAX / 2)
        return max(self.rule.chunk, min(FORWARD_TOKENS_MAX, by_rate))

    def layers(self) -> LayerMap:
        """Return the map of the model's caches. Raises: LeftOut."""
        try:
            return LayerMap(self.engine.probe())
        except UnknownCache as unknown:
            raise LeftOut(f"the model keeps {unknown}, which is never reused") from unknown

    def begin(self, stage: str) -> None:
        """Name the check that runs from here on."""
        self.stage, self.stage_began_s = stage, self.spent_s

    def tell(
        self, verdict: Verdict, figures: dict[str, Figure] | None = None, reason: str = ""
    ) -> None:
        """Set the result of the check that is running."""
        seconds = self.spent_s - self.stage_began_s
        result = CheckResult(self.stage, verdict, figures or {}, seconds, reason)
        self.results[self.stage] = result

    def prompts(self) -> list[list[int]]:
        """Return the canary's prompts, with the cold answers between them, as far as known."""
        assert self.canary is not None
        prompts: list[list[int]] = []
        history: list[int] = []
        for number, turn in enumerate(self.canary.turns):
            history = [*history, *turn]
            prompts.append(history)
            if number == len(self.cold):
                break
            history = [*history, *self.cold[number].tokens]
        return prompts

    def cuts_of(self, ids: Sequence[int]) -> list[int]:
        return self.rule.cuts(list(ids))

    def needs_cold(self) -> None:
        """Raises: LeftOut: the canary's prompts have not all been answered cold."""
        if self.canary is None or len(self.cold) < len(self.canary.turns):
            raise LeftOut("there are no cold answers to compare with")

    def needs(self, nbytes: int, what: str) -> None:
        """Raises: LeftOut: there is no room for so much beside what is kept."""
        room = self.room()
        if nbytes > room:
            raise LeftOut(f"{what} takes {_mb(nbytes)} and {_mb(room)} are free")


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
