"""Saves the findings about one model on one machine, beside the cache.

The file holds figures and verdicts, no prompts and no paths. A server reads it at its start,
for `auto` settings. A running server never changes, because kept KV depends on chunk and dtype.
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

SCHEMA: Final = 3  # version of the file and of the figures' meaning
FILE_BYTES_MAX: Final = 1 << 18
FOLDER: Final = "doctor"  # folder in KV_CACHE_DIR
# The errors that reading a damaged or foreign file may raise.
DAMAGE: Final = (*(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),)

Figure = str | int | float | bool | None
# "differs" means that logits differ by more than rounding; `auto` settings then avoid the cause.
Verdict = Literal["ok", "differs", "fault", "left out"]


@dataclass(frozen=True, slots=True)
class Subject:
    """Names what findings are about. If any field differs, the findings do not hold."""

    chip: str  # the device's name, e.g. "Apple M2 Max"
    backend: str  # "metal", "cuda" or "cpu"
    model: str  # hash of the parts of its WeightsIdentity
    mlx: str  # version
    mlx_lm: str  # version

    @property
    def file_name(self) -> str:
        """The file's name; it depends on the schema, so that an older server keeps its file."""
        parts = (str(SCHEMA), self.chip, self.backend, self.model, self.mlx, self.mlx_lm)
        return f"{root_hash(parts).hex()}.json"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. `reason` says what is wrong, or why the check was left out."""

    name: str
    verdict: Verdict
    figures: Mapping[str, Figure] = field(default_factory=dict)
    seconds: float = 0.0  # computing time
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of all checks, and the values of `auto` settings that follow from them.

    A value is None if it was not found out; then `auto` has its default. All values but `float16`
    hold for weights of `dtype` only.
    """

    subject: Subject
    dtype: str  # dtype of the weights during the checks, e.g. "bfloat16"
    checks: tuple[CheckResult, ...] = ()
    exact: bool | None = None  # whether only canonical KV is reused
    chunk: int | None = None  # prompt tokens of one forward, if another size is clearly faster
    float16: bool | None = None  # whether float16 replaces the checkpoint's bfloat16
    # Cost of a forward by its number of tokens of one sequence; one token costs 1.
    row_costs: Mapping[int, float] | None = None
    drafts_alike: bool | None = None  # whether drafts leave the chosen tokens unchanged
    made_at: float = 0.0  # seconds since 1970
    attempts: int = 0  # runs that began; none of them has ended if `checks` is empty

    @property
    def faults(self) -> tuple[CheckResult, ...]:
        return tuple(check for check in self.checks if check.verdict == "fault")


class FindingsFile:
    """Reads and writes the findings about one subject. An unusable file counts as missing.

    Owner: the thread that made it.
    """

    def __init__(self, kv_cache_dir: Path, subject: Subject) -> None:
        self._subject = subject
        self._path = kv_cache_dir / FOLDER / subject.file_name

    def load(self) -> Findings | None:
        """Return the saved findings; None without a file, or if it is damaged or foreign."""
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
        """Write the file, readable by its owner alone; replace an older file. Raises: OSError."""
        assert findings.subject == self._subject, (findings.subject, self._subject)
        text = json.dumps(findings_json(findings), allow_nan=False, indent=1).encode()
        write_small_file(self._path, self._digest(text).encode() + b"\n" + text)

    def _digest(self, text: bytes) -> str:
        """Return the digest at the beginning of the file: a server trusts only an intact file."""
        return xxh3_128(self._subject.file_name.encode() + text).hexdigest()

    def _miss(self, reason: str) -> None:
        log.warning("what the checks of this model found cannot be read: %s", reason)


def findings_json(findings: Findings) -> dict[str, Any]:
    """Return findings as JSON; figures that are NaN or infinite become None."""
    fields = asdict(findings)
    fields["checks"] = list(fields["checks"])
    for check in fields["checks"]:
        check["figures"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in check["figures"].items()
        }
    if findings.row_costs is not None:
        fields["row_costs"] = {str(rows): cost for rows, cost in findings.row_costs.items()}
    return {"schema": SCHEMA} | fields


def findings_from(values: Any) -> Findings:
    """Return the findings in the JSON of `findings_json`.

    Raises:
        DAMAGE: the JSON holds no findings.
    """
    if values["schema"] != SCHEMA:
        raise ValueError(f"its schema is {values['schema']!r}, expected {SCHEMA}")
    fields = {name: value for name, value in values.items() if name != "schema"}
    fields["subject"] = Subject(**values["subject"])
    fields["checks"] = tuple(CheckResult(**check) for check in values["checks"])
    if values["row_costs"] is not None:
        fields["row_costs"] = {int(rows): float(cost) for rows, cost in values["row_costs"].items()}
    return Findings(**fields)
