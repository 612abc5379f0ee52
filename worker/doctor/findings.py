"""Keeps what the checks found of one model on one machine, beside the cache.

The file holds figures and verdicts, no prompt and no path. A setting that is `auto` reads it at a
start; nothing changes amid a life, since the chunk and the dtype say what kept KV is.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from xxhash import xxh3_128

from hearth.shared.private_files import read_small_file, write_small_file
from hearth.worker.cache.block_hash import root_hash

log = logging.getLogger(__name__)

SCHEMA: Final = 3  # of the file, and of what the checks mean by their figures
FILE_BYTES_MAX: Final = 1 << 18
FOLDER: Final = "doctor"  # in KV_CACHE_DIR
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
    """Reads and writes the findings about one subject. A file that is no use is none.

    Owner: the thread that made it.
    """

    def __init__(self, kv_cache_dir: Path, subject: Subject) -> None:
        self._subject = subject
        self._path = kv_cache_dir / FOLDER / subject.file_name

    def load(self) -> Findings | None:
        """Return what was found, None where nothing was, or where the file is torn or foreign."""
        try:
            digest, _, text = read_small_file(self._path, FILE_BYTES_MAX).partition(b"\n")
            if digest.decode() != self._digest(text):
                raise ValueError("it is torn, or not as it was written")
            return findings_from(json.loads(text))
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
        text = json.dumps(as_row(findings), allow_nan=False, indent=1).encode()
        write_small_file(self._path, self._digest(text).encode() + b"\n" + text)

    def _digest(self, text: bytes) -> str:
        """Return what a file about this subject begins with: a start goes by what it says."""
        return xxh3_128(self._subject.file_name.encode() + text).hexdigest()

    def _miss(self, reason: str) -> None:
        log.warning("what the checks of this model found cannot be read: %s", reason)


def as_row(findings: Findings) -> dict[str, Any]:
    """Return findings as JSON: figures that are no numbers become None."""
    row = asdict(findings)
    row["checks"] = list(row["checks"])
    for check in row["checks"]:
        check["figures"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in check["figures"].items()
        }
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
    return Findings(**told)
