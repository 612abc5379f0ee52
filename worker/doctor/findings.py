"""Keeps what the checks found of one model on one machine, beside the cache.

The file holds figures and verdicts, no prompt and no path. A setting that is `auto` reads it at a
start; nothing changes amid a life, since the chunk and the dtype say what kept KV is.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hearth.shared.make_private_directory import make_private
from hearth.shared.read_small_file import read_small_file
from hearth.worker.cache.block_hash import root_hash

log = logging.getLogger(__name__)

SCHEMA: Final = 2  # of the file, and of what the checks mean by their figures
FILE_BYTES_MAX: Final = 1 << 18
FOLDER: Final = "doctor"  # in KV_CACHE_DIR
CHUNK_MAX: Final = 16_384  # what PREFILL_CHUNK takes at most
TIME_MAX: Final = 1e11  # seconds since 1970 that still are a date
# What reading a file raises that holds anything else than findings.
DAMAGE: Final = (*(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),)

Figure = str | int | float | bool | None
# "differs": beyond rounding, and what is `auto` is set so that no answer depends on it.
Verdict = Literal["ok", "differs", "fault", "left out"]


@dataclass(frozen=True, slots=True)
class Subject:
    """Names what findings are about: other findings hold where any part of it differs."""

    chip: str  # as the device names itself, e.g. "Apple M2 Max"
    backend: str  # "metal", "cuda" or "cpu"
    model: str  # hash of the parts of its WeightsIdentity
    mlx: str  # versions
    mlx_lm: str

    @property
    def file_name(self) -> str:
        """The file's name; the schema is in it, so that an older server keeps its own."""
        parts = (str(SCHEMA), self.chip, self.backend, self.model, self.mlx, self.mlx_lm)
        return f"{root_hash(parts).hex()}.json"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found. `reason` says what is wrong, or why it was left out."""

    name: str
    verdict: Verdict
    figures: Mapping[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0  # of computing
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What all checks found, and what settings that are `auto` mean by it.

    Where one of these is None, it was not found out: `auto` means what it means without findings.
    All but `float16` hold for weights of `dtype` only.
    """

    subject: Subject
    dtype: str  # of the weights as the checks ran, e.g. "bfloat16"
    checks: tuple[CheckResult, ...] = ()
    exact: bool | None = None  # whether only canonical KV is to be reused
    chunk: int | None = None  # prompt tokens of one forward that are worth a change
    float16: bool | None = None  # whether float16 stands in for the checkpoint's bfloat16
    # What a forward of so many tokens of one sequence takes, that of one token being 1.
    row_costs: Mapping[int, float] | None = None
    drafts_alike: bool | None = None  # whether such forwards chose the tokens of one by one
    made_at: float = 0.0  # seconds since 1970
    attempts: int = 0  # runs that began; without `checks` none has come to its end

    @property
    def faults(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.verdict == "fault")


class FindingsFile:
    """Reads and writes the findings about one subject. `misses` counts files that are no use.

    Owner: the thread that made it.
    """

    def __init__(self, kv_cache_dir: Path, subject: Subject) -> None:
        self.misses = 0
        self._subject = subject
        self._path = kv_cache_dir / FOLDER / subject.file_name

    def load(self) -> Findings | None:
        """Return what was found, None where nothing was, or where the file is torn or foreign."""
        try:
            found = findings_from(json.loads(read_small_file(self._path, FILE_BYTES_MAX)))
            if found.subject != self._subject:
                raise ValueError("it is about another machine or model")
            return found
        except FileNotFoundError:
            return None
        except OSError as error:
            self._miss(error.strerror or type(error).__name__)
        except DAMAGE as error:
            self._miss(f"{type(error).__name__} {error}")
        return None

    def save(self, findings: Findings) -> None:
        """Write `findings` over what was there, for their owner alone. Raises: OSError."""
        assert findings.subject == self._subject, (findings.subject, self._subject)
        make_private(self._path.parent)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(as_row(findings), file, allow_nan=False, indent=1)
        temporary.replace(self._path)

    def _miss(self, reason: str) -> None:
        self.misses += 1
        log.warning("what the checks of this model found cannot be read: %s", reason)


def as_row(findings: Findings) -> dict[str, Any]:
    """Return findings as JSON: figures that are no numbers become None."""
    row = asdict(findings)
    row["checks"] = list(row["checks"])
    for check in row["checks"]:
        check["figures"] = {name: _finite(value) for name, value in check["figures"].items()}
    if findings.row_costs is not None:
        row["row_costs"] = {str(rows): cost for rows, cost in findings.row_costs.items()}
    return {"schema": SCHEMA} | row


def findings_from(row: Any) -> Findings:
    """Return the findings that `as_row` told.

    Raises:
        DAMAGE: they are none.
    """
    if row["schema"] != SCHEMA:
        raise ValueError(f"its schema is {row['schema']!r}, expected {SCHEMA}")
    told = {name: value for name, value in row.items() if name != "schema"}
    told["subject"] = Subject(**row["subject"])
    told["checks"] = tuple(CheckResult(**check) for check in row["checks"])
    if row["row_costs"] is not None:
        told["row_costs"] = {int(rows): float(cost) for rows, cost in row["row_costs"].items()}
    found = Findings(**told)
    if not (_can_be_gone_by(found) and all(map(_can_be_shown, found.checks))):
        raise ValueError("a value is none that checks tell")
    return found


def _can_be_gone_by(found: Findings) -> bool:
    """Whether a start can go by the values: none of them may end a worker."""
    choices = (found.exact, found.float16, found.drafts_alike)
    chunk = found.chunk
    costs = {1: 1.0, 2: 1.0} if found.row_costs is None else found.row_costs
    return (
        all(each in (None, False, True) for each in choices)
        and (chunk is None or (type(chunk) is int and 0 < chunk <= CHUNK_MAX))
        and (len(costs) > 1 and min(costs) == costs[1] == 1)
        and all(0 < cost < math.inf for cost in costs.values())
        and (type(found.attempts) is int and type(found.dtype) is str)
        and 0 <= found.made_at < TIME_MAX
    )


def _can_be_shown(check: CheckResult) -> bool:
    texts = (check.name, check.verdict, check.reason)
    figures = all(isinstance(each, str | int | float | None) for each in check.figures.values())
    is_known = check.verdict in get_args(Verdict) and 0 <= check.seconds < math.inf
    return is_known and figures and all(isinstance(text, str) for text in texts)


def _finite(value: Figure) -> Figure:
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return None if is_odd else value
