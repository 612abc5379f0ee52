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
ROWS_MAX: Final = 64  # of a forward: more than any draft has
TIME_MAX: Final = 1e11  # seconds since 1970 that still are a date
# What reading a file raises that holds anything else than findings.
DAMAGE: Final = (*(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),)

Figure = str | int | float | bool | None
# "differs": beyond rounding, and what is `auto` is set so that no answer depends on it.
Verdict = Literal["ok", "differs", "fault", "left out"]
VERDICTS: Final = get_args(Verdict)


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
    All but `float16` hold for weights of `dtype` only, see `holds_for`.
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

    def holds_for(self, dtype: str) -> bool:
        """Whether the checks ran with weights of `dtype`."""
        return self.dtype == dtype

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
    return Findings(
        subject=Subject(**{name: _a(str, value) for name, value in row["subject"].items()}),
        dtype=_a(str, row["dtype"]),
        checks=tuple(_check(check) for check in _a(list, row["checks"])),
        exact=_maybe(bool, row["exact"]),
        chunk=_chunk(_maybe(int, row["chunk"])),
        float16=_maybe(bool, row["float16"]),
        row_costs=_row_costs(_maybe(dict, row["row_costs"])),
        drafts_alike=_maybe(bool, row["drafts_alike"]),
        made_at=_time(row["made_at"]),
        attempts=_a(int, row["attempts"]),
    )


def _chunk(value: int | None) -> int | None:
    if value is not None and not 0 < value <= CHUNK_MAX:
        raise ValueError(f"a chunk is {value:,} tokens; at most {CHUNK_MAX:,} are read at once")
    return value


def _row_costs(value: dict[Any, Any] | None) -> dict[int, float] | None:
    """Return the costs by their rows; what is measured by costs 1."""
    if value is None:
        return None
    costs = {_rows(_a(str, name)): _cost(cost) for name, cost in value.items()}
    if len(costs) < len(value) or costs.get(1) != 1:
        raise ValueError("costs of rows are not relative to one row")
    return costs


def _rows(name: str) -> int:
    rows = int(name)
    if not 0 < rows <= ROWS_MAX or str(rows) != name:
        raise ValueError(f"a forward has {name:.20} rows; at most {ROWS_MAX} are believed")
    return rows


def _cost(value: Any) -> float:
    cost = float(_a((int, float), value))
    if not 0 < cost < math.inf:
        raise ValueError(f"rows cost {cost:g}")
    return cost


def _time(value: Any) -> float:
    seconds = float(_a((int, float), value))
    if not 0 <= seconds < TIME_MAX:
        raise ValueError(f"a time is {seconds:g}")
    return seconds


def _check(row: Any) -> CheckResult:
    if row["verdict"] not in VERDICTS:
        raise ValueError(f"a verdict is {row['verdict']!r}")
    figures = _a(dict, row["figures"])
    return CheckResult(
        name=_a(str, row["name"]),
        verdict=row["verdict"],
        figures={_a(str, name): _figure(value) for name, value in figures.items()},
        seconds=float(_a((int, float), row["seconds"])),
        reason=_a(str, row["reason"]),
    )


def _figure(value: Any) -> Figure:
    figure: Figure = _maybe((str, int, float, bool), value)
    return figure


def _maybe(kinds: type | tuple[type, ...], value: Any) -> Any:
    return None if value is None else _a(kinds, value)


def _a(kinds: type | tuple[type, ...], value: Any) -> Any:
    """Return `value`, which is one of `kinds`; True is no number."""
    is_odd_bool = isinstance(value, bool) and kinds in (int, (int, float))
    if not isinstance(value, kinds) or is_odd_bool:
        raise ValueError(f"a value is {value!r:.80}")
    return value


def _finite(value: Figure) -> Figure:
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return None if is_odd else value
