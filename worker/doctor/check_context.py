"""Holds what checks share: the model, the canary, the time that is left, what was found so far."""

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hearth.worker.cache.block_hash import PrefixHash, root_hash
from hearth.worker.doctor.checked_machine import weights_dtype
from hearth.worker.doctor.findings import CheckResult, Figure, Verdict
from hearth.worker.doctor.upstream_forwards import Answer
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks

TURNS: Final = 5
FIRST_SHARE: Final = 2  # the first turn has one part in so many: system, tools and a file
TURN_TOKENS_MIN: Final = 24

# Plain prose and code; numbered lines keep it from repeating itself.
_LINES: Final = (
    "The harbour master writes down each ship that comes in, its cargo and its captain.",
    "def total(rows): return sum(row.weight * row.count for row in rows if row.count > 0)",
    "On the third day the wind turned north, and two of the boats stayed behind the pier.",
    "Error: the file 'manifest.json' has 14 entries, and 12 were expected. Check lines 3 and 9.",
    "Who paid for the grain? The ledger says one thing, and the letter from the mill another.",
    'for name, place in sorted(ships.items()): print(f"{name:12} lies at {place}")',
    "Please list what is still missing, and say which of it can wait until next week.",
    "The lamp on the north tower burns oil; the one on the south tower was changed last year.",
)
_OTHER: Final = "Leave that. Tell me instead about the weather at the northern tower in winter."


@dataclass(frozen=True, slots=True)
class Canary:
    """The user's part of a conversation, and how long each answer is. Immutable."""

    turns: tuple[tuple[int, ...], ...]  # tokens between two answers, the assistant's header too
    other: tuple[int, ...]  # in place of a late turn: where the conversation forks
    answer_tokens: int

    @property
    def depth(self) -> int:
        """Tokens of the last prompt."""
        return sum(map(len, self.turns)) + (len(self.turns) - 1) * self.answer_tokens


def make_canary(tokenizer: Any, marks: TurnMarks, depth: int, answer_tokens: int) -> Canary:
    """Return a canary whose last prompt has some `depth` tokens."""
    text = _endless(tokenizer)
    said = max(TURN_TOKENS_MIN * TURNS, depth - (TURNS - 1) * answer_tokens)
    first = said // FIRST_SHARE
    lengths = [first] + [(said - first) // (TURNS - 1)] * (TURNS - 1)
    turns = tuple(_turn(tokenizer, marks, itertools.islice(text, n)) for n in lengths)
    other = _turn(tokenizer, marks, iter(_encoded(tokenizer, _OTHER)))
    return Canary(turns, other, answer_tokens)


def _turn(tokenizer: Any, marks: TurnMarks, said: Iterator[int]) -> tuple[int, ...]:
    """Return a user's message and the header of the answer, where the template has marks."""
    headers = marks.assistant_headers
    own = {header[0] for header in headers}
    opening = sorted(marks.header_ids - own)[:1] or sorted(own)[:1]
    answer = headers[0] if headers else tuple(_encoded(tokenizer, "\n\nAnswer: "))
    return (*opening, *_encoded(tokenizer, "user\n"), *said, *answer)


def _endless(tokenizer: Any) -> Iterator[int]:
    for number in itertools.count(1):
        yield from _encoded(tokenizer, f"{number}. {_LINES[number % len(_LINES)]}\n")


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


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
