"""Counts how far an install is: from what pip says, and from what lies in site-packages by now.

pip says nothing while it unpacks, which is half of the time; each package that is whole has an
INSTALLER file by then. Standard library only: it runs before anything is installed.
"""

import csv
import re
import time
from pathlib import Path
from typing import Final

BAR_CELLS: Final = 24
_UNITS: Final = {"bytes": 1, "kB": 1000, "MB": 1000 * 1000}
_PACKED: Final = (".whl", ".tar.gz", ".zip")
# The lines of pip that tell something, and what they name.
_COLLECTING: Final = re.compile(r"\s*Collecting (\S+)")
_PRESENT: Final = re.compile(r"\s*Requirement already satisfied: (\S+)")
_FILE: Final = re.compile(
    r"\s*(Downloading|Using cached|Processing) (\S+)(?: \((\d+(?:\.\d+)?) (bytes|kB|MB)\))?"
)
_RAW: Final = re.compile(r"Progress (\d+) of \d+")  # of --progress-bar=raw
_BUILDING: Final = re.compile(r"\s*Building wheel")
_UNPACKING: Final = re.compile(r"Installing collected packages: (.+)")


class InstallProgress:
    """What the pip commands of an install have found, fetched and unpacked. Owner: one thread.

    Invariant: what is fetched was found, and what is unpacked is among what pip said it unpacks.
    """

    def __init__(self, venv: Path) -> None:
        self.stage = "Preparing"
        self._venv = venv
        self._began = time.monotonic()
        self._began_clock = time.time()
        self._present: set[str] = set()
        self._found: set[str] = set()
        self._fetched: set[str] = set()
        self._fetched_bytes = 0
        self._fetching: tuple[str, int] | None = None  # what pip downloads now: name, bytes
        self._fetching_bytes = 0  # that have come of it
        self._unpacking: set[str] = set()
        self._unpacked: dict[str, int] = {}  # name -> bytes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def take(self, line: str) -> bool:
        """Take a line of pip's in; return whether it belongs into the log."""
        if raw := _RAW.match(line):
            self._fetching_bytes = int(raw[1])
            return False
        if present := _PRESENT.match(line):
            self._present.add(_requirement(present[1]))
            self.stage = "Fetching"
        elif collecting := _COLLECTING.match(line):
            self._end_fetch()
            self._found.add(_requirement(collecting[1]))
            self.stage = "Fetching"
        elif (file := _FILE.match(line)) and file[2].endswith(_PACKED):  # else it is metadata
            self._take_file(file)
        elif _BUILDING.match(line):
            self._end_fetch()
            self.stage = "Building"
        elif unpacking := _UNPACKING.match(line):
            self._end_fetch()
            self._unpacking |= {_plain(name.strip()) for name in unpacking[1].split(",")}
            self.stage = "Installing"
        return True

    def _take_file(self, file: re.Match[str]) -> None:
        self._end_fetch()
        verb, path, size, unit = file.groups()
        size_bytes = int(float(size) * _UNITS[unit]) if size else _local_bytes(path)
        self._fetching, self._fetching_bytes = (_file_name(path), size_bytes), 0
        self._found.add(self._fetching[0])
        self.stage = "Fetching"
        if verb != "Downloading":
            self._end_fetch()

    def _end_fetch(self) -> None:
        """Count what was downloaded: pip goes on with something else."""
        if self._fetching is not None:
            name, size_bytes = self._fetching
            self._fetched.add(name)
            self._fetched_bytes += size_bytes
            self._fetching, self._fetching_bytes = None, 0

    def look(self) -> None:
        """Count what has been unpacked until now, where pip unpacks."""
        if self.stage != "Installing":
            return
        for mark in self._venv.glob("lib/*/site-packages/*.dist-info/INSTALLER"):
            name = _plain(mark.parent.name.partition("-")[0])
            if name in self._unpacking and name not in self._unpacked and self._is_fresh(mark):
                self._unpacked[name] = _recorded_bytes(mark.with_name("RECORD"))

    def _is_fresh(self, mark: Path) -> bool:
        """Return whether this install wrote `mark`; else pip is about to remove it, or just has."""
        try:
            return mark.stat().st_mtime >= self._began_clock - 1
        except OSError:
            return False

    def counts(self) -> tuple[int, int]:
        """Return how many packages the stage is through with, and of how many."""
        if self.stage == "Installing":
            return len(self._unpacked), len(self._unpacking)
        return (len(self._fetched), len(self._found)) if self.stage == "Fetching" else (0, 0)

    def line(self, columns: int | None = None) -> str:
        """Return how far it is, for a terminal of so many columns with a bar; None = without."""
        done, whole = self.counts()
        parts = [f"{done} of {whole} packages"] if whole else []
        if not whole and self._present:
            parts = [f"{len(self._present)} packages are here already"]
        size_bytes = sum(self._unpacked.values())
        if self.stage == "Fetching":
            size_bytes = self._fetched_bytes + self._fetching_bytes
        if whole and size_bytes:
            parts.append(megabytes(size_bytes))
        parts.append(f"{self.seconds:.0f} s")
        told = ", ".join(parts)
        if columns is None:
            return f"{self.stage}: {told}"
        return f"{self.stage:<10} {bar(done, whole)} {told}"[: max(columns - 1, 0)]

    def summary(self) -> str:
        size = megabytes(sum(self._unpacked.values()))
        return f"{len(self._unpacked)} packages ({size})"


def bar(done: int, whole: int, cells: int = BAR_CELLS) -> str:
    """Return a bar of so many cells, full only where all is done."""
    full = cells * done // whole if whole else 0
    return f"[{'#' * full}{'-' * (cells - full)}]"


def megabytes(size_bytes: int) -> str:
    """Return `size_bytes` in three digits or so: 812 kB, 36.8 MB, 1.62 GB."""
    for unit, per in (("GB", 10**9), ("MB", 10**6)):
        if size_bytes >= per:
            return f"{size_bytes / per:.3g} {unit}"
    return f"{size_bytes / 1000:.0f} kB"


def _plain(name: str) -> str:
    """Return the one spelling of a package's name: PyYAML and pyyaml are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirement(text: str) -> str:
    return _plain(re.split(r"[^A-Za-z0-9._-]", text, maxsplit=1)[0])


def _file_name(path: str) -> str:
    """Return the package of a wheel or an sdist, which may be an address or a path."""
    file = path.rpartition("/")[2]
    name = file.partition("-")[0] if file.endswith(".whl") else file.rpartition("-")[0]
    return _plain(name)


def _local_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # an address
        return 0


def _recorded_bytes(record: Path) -> int:
    """Return the bytes of all files of a package, as its RECORD has them."""
    try:
        with record.open(encoding="utf-8", newline="") as file:
            return sum(
                int(row[2]) for row in csv.reader(file) if len(row) == 3 and row[2].isdigit()
            )
    except OSError:  # pip is about to write it
        return 0
