"""Holds what checks share: the model, the canary, the time that is left, the results so far.

For comparison, the module also runs a model's forwards as mlx-lm does, without Hearth, and computes
the difference between two answers with the same tokens.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from hearth.worker.cache.block_hash import PrefixHash, root_hash
from hearth.worker.doctor.findings import CheckResult, Figure, Verdict
from hearth.worker.engine.compute_dtype import dtype_of
from hearth.worker.engine.decode.sampler import Sampler
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.layer_kinds.kinds import probe_tokens
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks

TURNS: Final = 5
FIRST_SHARE: Final = 2  # the first turn has 1/2 of the tokens, as with system, tools and a file
TURN_TOKENS_MIN: Final = 24

# Plain prose and code; numbers make the lines differ.
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
    """The user's part of a conversation, and the length of each answer. Immutable."""

    turns: tuple[tuple[int, ...], ...]  # tokens between two answers, with the assistant's header
    other: tuple[int, ...]  # message in place of a late turn, at which the conversation forks
    answer_tokens: int

    @property
    def depth(self) -> int:
        """The number of tokens of the last prompt."""
        return sum(map(len, self.turns)) + (len(self.turns) - 1) * self.answer_tokens


def make_canary(tokenizer: Any, marks: TurnMarks, depth: int, answer_tokens: int) -> Canary:
    """Return a canary with about `depth` tokens in its last prompt."""
    text = (
        token
        for number in itertools.count(1)
        for token in _encoded(tokenizer, f"{number}. {_LINES[number % len(_LINES)]}\n")
    )
    user_tokens = max(TURN_TOKENS_MIN * TURNS, depth - (TURNS - 1) * answer_tokens)
    first = user_tokens // FIRST_SHARE
    lengths = [first] + [(user_tokens - first) // (TURNS - 1)] * (TURNS - 1)
    turns = tuple(_turn(tokenizer, marks, itertools.islice(text, n)) for n in lengths)
    other = _turn(tokenizer, marks, iter(_encoded(tokenizer, _OTHER)))
    return Canary(turns, other, answer_tokens)


def _turn(tokenizer: Any, marks: TurnMarks, text: Iterator[int]) -> tuple[int, ...]:
    """Return a user's message and the header of an answer, with the template's marks if any."""
    headers = marks.assistant_headers
    assistant_ids = {header[0] for header in headers}
    opening = sorted(marks.header_ids - assistant_ids)[:1] or sorted(assistant_ids)[:1]
    answer = headers[0] if headers else tuple(_encoded(tokenizer, "\n\nAnswer: "))
    return (*opening, *_encoded(tokenizer, "user\n"), *text, *answer)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


Logprobs = NDArray[np.float32]  # (tokens, vocabulary)
Forwards = Generator[None, None, "Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The log probabilities at each token of an answer."""

    logprobs: Logprobs

    @property
    def tokens(self) -> list[int]:
        """The greedy tokens."""
        return [int(token) for token in self.logprobs.argmax(axis=-1)]


SECONDS_MAX: Final = 170.0  # computing time; all checks must end within three minutes
DEPTH_MIN: Final = 320  # tokens of the canary's last prompt, on the slowest machine ...
DEPTH_MAX: Final = 4096  # ... and on a fast machine
ROOT: Final[PrefixHash] = root_hash(["doctor"])

Steps = Generator[None, None, None]  # yields between forwards, where a check can be dropped


class LeftOut(Exception):
    """A check cannot be made here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CheckRules:
    """The limits of the checks. Immutable."""

    default_chunk: int  # prompt tokens of one forward, without a setting or a finding
    seconds_max: float = SECONDS_MAX
    depth_max: int = DEPTH_MAX
    answer_tokens: int = 16
    ssd_directory: Path | None = None  # KV_CACHE_DIR; None = nothing is written
    ssd_bytes: int = 256 << 20
    ssd_bytes_per_day: int = 0  # limit of all writes of a day; 0 = no limit


@dataclass
class CheckContext:
    """One run of the checks. Owner: the inference thread.

    Invariant: between two checks the context holds no KV; only figures and answers stay.
    """

    loaded: LoadedModel
    engine: Engine  # the checks' own engine, with its own decoder
    rule: CutRule
    rules: CheckRules
    room: Callable[[], int]  # returns the bytes that may be allocated now
    clock: Callable[[], float] = time.perf_counter
    results: dict[str, CheckResult] = field(default_factory=dict)
    spent_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_s: float = 0.0  # seconds to decode one token alone
    canary: Canary | None = None
    cold: list[Answer] = field(default_factory=list)  # cold answers to the canary's prompts
    stage: str = ""  # name of the running check
    stage_began_s: float = 0.0

    def __post_init__(self) -> None:
        self.dtype = dtype_of(self.loaded.model) or "unknown"
        self.model: Any = self.loaded.model

    @property
    def left_s(self) -> float:
        return self.rules.seconds_max - self.spent_s

    def layers(self) -> LayerMap:
        """Return the map of the model's caches. Raises: LeftOut: their KV is never reused."""
        try:
            probe = self.engine.probe(probe_tokens(self.engine.new_cache()))
            return LayerMap(probe)
        except UnknownCache as unknown:
            raise LeftOut(f"the model keeps {unknown}, which is never reused") from unknown

    def begin_stage(self, stage: str) -> None:
        """Begin the stage of this name; a check begins with its first stage."""
        self.stage, self.stage_began_s = stage, self.spent_s

    def report(
        self, verdict: Verdict, figures: dict[str, Figure] | None = None, reason: str = ""
    ) -> None:
        """Set the result of the running stage."""
        seconds = self.spent_s - self.stage_began_s
        self.results[self.stage] = CheckResult(self.stage, verdict, figures or {}, seconds, reason)

    def prompts(self) -> list[list[int]]:
        """Return the canary's prompts, as far as the cold answers between them are known."""
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

    def require_cold_answers(self) -> None:
        """Raises: LeftOut: the canary's prompts have not all been answered cold."""
        if self.canary is None or len(self.cold) < len(self.canary.turns):
            raise LeftOut("there are no cold answers to compare with")

    def require_bytes(self, nbytes: int, what: str) -> None:
        """Raises: LeftOut: `nbytes` cannot be allocated now; `what` needs them."""
        room = self.room()
        if nbytes > room:
            raise LeftOut(f"{what} takes {_mb(nbytes)} and {_mb(room)} are free")


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


# ---------------------------------------------------------------- upstream's forwards


class UpstreamSequence:
    """One sequence in its own cache. Every generator yields after each forward."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.cache: list[Any] = make_prompt_cache(model)

    def read(self, ids: Sequence[int], ends: Sequence[int]) -> Generator[None]:
        """Feed `ids` up to the last of `ends`, with one forward up to each end."""
        start = 0
        for end in ends:
            assert start < end <= len(ids), (start, end, len(ids))
            self._model(mx.array(list(ids[start:end]))[None], cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
            mx.clear_cache()
            start = end
            yield

    def answer(self, tail: Sequence[int], count: int, forced: Sequence[int] = ()) -> Forwards:
        """Feed `tail`, then one token at a time; the tokens are greedy, or `forced`.

        The last chosen token is not fed.
        """
        rows: list[Logprobs] = []
        inputs = list(tail)
        for number in range(count):
            logits = self._model(mx.array(inputs)[None], cache=self.cache)[:, -1, :]
            rows.append(as_numbers(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
            inputs = [forced[number] if forced else int(rows[-1].argmax())]
            yield
        return Answer(np.stack(rows))


def timed(forwards: Generator[None, None, Any]) -> Generator[None, None, list[float]]:
    """Run `forwards`, and return the seconds of each, without the time between them."""
    seconds, began = [], time.perf_counter()
    for _ in forwards:
        seconds.append(time.perf_counter() - began)
        yield
        began = time.perf_counter()
    return seconds


def cold_answer(
    model: Any, ids: Sequence[int], cuts: Sequence[int], count: int, forced: Sequence[int] = ()
) -> Forwards:
    """Read a prompt in forwards that end at `cuts`, and return the answer."""
    sequence = UpstreamSequence(model)
    yield from sequence.read(ids, cuts)
    return (yield from sequence.answer(ids[cuts[-1] if cuts else 0 :], count, forced))


def as_numbers(logprobs: mx.array) -> Logprobs:
    return np.array(logprobs.astype(mx.float32)).reshape(-1)


def forced_choice(tokens: Sequence[int], rows: list[Any]) -> Sampler:
    """Return a sampler that chooses `tokens` one after another, then repeats the last token.

    For each choice it appends the log probabilities (1, vocabulary) to `rows`.
    """

    def sample(logprobs: mx.array, positions: Sequence[int]) -> mx.array:
        for row, position in enumerate(positions):
            assert position == len(rows), (position, len(rows))
            rows.append(logprobs[row : row + 1])
        chosen = [tokens[min(position, len(tokens) - 1)] for position in positions]
        return mx.array(chosen, dtype=mx.uint32)

    return sample


# The most that rounding may change, by the weights' type, as a share of a row's spread.
ROUNDING: Final = {"float32": 1e-3}
ROUNDING_OF_16_BITS: Final = 0.25
# A smaller difference counts as rounding, however little another cut of the prompt changed.
FLOOR: Final = {"float32": 1e-4}
FLOOR_OF_16_BITS: Final = 0.03
NOISE_FACTOR: Final = 4.0  # multiple of the difference that another cut of the same tokens makes


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one answer's log probabilities are from another's."""

    tokens: int  # number of compared tokens
    equal_tokens: int  # number of compared tokens with the same greedy choice
    largest: float  # largest difference of a log probability; NaN if one is no number
    relative: float  # largest difference, divided by the spread of its row

    @property
    def is_none(self) -> bool:
        return self.largest == 0

    @property
    def has_other_tokens(self) -> bool:
        return self.equal_tokens < self.tokens

    def figures(self) -> dict[str, Figure]:
        return {
            "tokens": self.tokens,
            "equal_tokens": self.equal_tokens,
            "bits_equal": self.is_none,
            "largest": self.largest,
            "relative": self.relative,
        }

    def __str__(self) -> str:
        same = f"{self.equal_tokens} of {self.tokens} tokens are the same"
        return f"{same}, log probabilities differ by up to {self.largest:.3g}"


def difference(answer: Answer, expected: Answer) -> Difference:
    """Return the difference between two answers with the same tokens."""
    a, b = answer.logprobs, expected.logprobs
    assert a.shape == b.shape, (a.shape, b.shape)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0, np.abs(a - b)).max(axis=-1)
        spread = np.maximum(b.std(axis=-1), 1e-6)
    equal = int((a.argmax(axis=-1) == b.argmax(axis=-1)).sum())
    return Difference(len(a), equal, float(apart.max()), float((apart / spread).max()))


def combined(parts: list[Difference]) -> Difference:
    """Return the differences of several answers as one."""
    return Difference(
        sum(part.tokens for part in parts),
        sum(part.equal_tokens for part in parts),
        _largest([part.largest for part in parts]),
        _largest([part.relative for part in parts]),
    )


def rounding_limit(dtype: str, noise: float | None = None) -> float:
    """Return the largest relative difference that counts as rounding.

    `noise` is the difference that another cut of the same tokens made, if known: the limit is lower
    for a model that rounds less.
    """
    highest = ROUNDING.get(dtype, ROUNDING_OF_16_BITS)
    if noise is None or not math.isfinite(noise):
        return highest
    return min(highest, max(FLOOR.get(dtype, FLOOR_OF_16_BITS), NOISE_FACTOR * noise))


def _largest(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)
