"""Counts the energy of the machine where the system tells it: RAPL on Linux, powermetrics on macOS.

Both need rights that a user mostly lacks: RAPL's files are root's on most systems, and powermetrics
is started by `sudo -n`, so it runs only where no password is asked. The macOS side follows what
others read from powermetrics and was never run on a Mac.
"""

import contextlib
import functools
import plistlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Protocol
from xml.parsers.expat import ExpatError

_RAPL: Final = Path("/sys/class/powercap")
_SAMPLE_MS: Final = 250
_POWERMETRICS: Final = (
    *("sudo", "-n", "powermetrics", "--samplers", "cpu_power,gpu_power", "-f", "plist"),
    *("-b", "0", "-i", str(_SAMPLE_MS)),
)
_ALLOWED: Final = ("sudo", "-n", "-l", "powermetrics")
_PLIST_BYTES_MAX: Final = 1 << 22  # of one sample, which has some 20 kB


class EnergyCounter(Protocol):
    """Counts the machine's energy from some time on."""

    def joules(self) -> float | None:
        """Return the count so far; None when it cannot be read."""


class NoCounter:
    """Stands where the system tells no energy."""

    def joules(self) -> float | None:
        """Return None."""
        return None


class RaplCounter:
    """Adds up the packages of Intel's and AMD's running average power limit.

    The counters wrap around (after some minutes at full load), so `joules` must be called oftener.
    Owner: one caller at a time.
    """

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        self._last: list[int] | None = None
        self._microjoules = 0

    def joules(self) -> float | None:
        try:
            now = [_number(package / "energy_uj") for package in self._packages]
            ranges = [_number(package / "max_energy_range_uj") for package in self._packages]
        except (OSError, ValueError):
            return None
        for last, new, most in zip(self._last or now, now, ranges, strict=True):
            self._microjoules += new - last if new >= last else new - last + most
        self._last = now
        return self._microjoules / 1e6


class PowermetricsCounter:
    """Adds up the samples of powermetrics: CPU, GPU and neural engine.

    `joules` is behind by up to a sample, a quarter of a second. Owner: any thread reads; one of
    its own adds. powermetrics ends when this process does, as nobody reads its pipe then.
    """

    def __init__(self, samples: IO[bytes]) -> None:
        self._samples = samples
        self._joules: float | None = None
        self._adder = threading.Thread(target=self._add, name="powermetrics", daemon=True)
        self._adder.start()

    def joules(self) -> float | None:
        return self._joules

    def wait(self) -> None:
        """Wait until powermetrics has ended."""
        self._adder.join()

    def _add(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for sample in plists(self._samples):
                self._joules = (self._joules or 0.0) + sample_joules(sample)


def plists(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield each property list of a stream that parts them by NUL bytes."""
    part = b""
    while more := stream.read(4096):
        *whole, part = (part + more).split(b"\0")
        yield from filter(None, whole)
        if len(part) > _PLIST_BYTES_MAX:
            raise ValueError("powermetrics wrote no end of a sample")


def sample_joules(sample: bytes) -> float:
    """Return the energy of one sample; 0 where it does not tell. Powers are in mW."""
    try:
        told = plistlib.loads(sample.strip())
        return float(told["processor"]["combined_power"] * told["elapsed_ns"] / 1e12)
    except (ExpatError, plistlib.InvalidFileException, ValueError, KeyError, TypeError):
        return 0.0


@functools.cache
def energy_counter() -> EnergyCounter:
    """Return this process's counter; the first call may start powermetrics."""
    if sys.platform == "darwin":
        return _mac_counter()
    packages = rapl_packages(_RAPL)
    return RaplCounter(packages) if packages else NoCounter()


def rapl_packages(place: Path) -> list[Path]:
    """Return the packages whose energy may be read: intel-rapl:0, not its parts intel-rapl:0:1."""
    found = []
    for package in sorted(place.glob("*-rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            if package.name.count(":") == 1 and _number(package / "energy_uj") >= 0:
                found.append(package)
    return found


def _mac_counter() -> EnergyCounter:
    try:
        allowed = subprocess.run(_ALLOWED, capture_output=True, timeout=5, check=False)
        if allowed.returncode:
            return NoCounter()
        started = subprocess.Popen(
            _POWERMETRICS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
    except (OSError, subprocess.TimeoutExpired):
        return NoCounter()
    assert started.stdout is not None
    return PowermetricsCounter(started.stdout)


def _number(path: Path) -> int:
    return int(path.read_text())
