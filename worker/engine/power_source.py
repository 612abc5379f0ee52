"""Tells whether the machine runs on mains power, as far as macOS or Linux say so."""

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hearth.shared.suspending_clock import awake_s

LOOK_S: Final = 30.0  # between two looks
_IOKIT: Final = "/System/Library/Frameworks/IOKit.framework/IOKit"
_UNLIMITED: Final = -2.0  # kIOPSTimeRemainingUnlimited: no battery is drawn on
_SUPPLIES: Final = Path("/sys/class/power_supply")


class PowerSource:
    """Remembers what the last look found. Owner: the inference thread, which never waits for one.

    What the system does not say counts as mains, and so does all before the first look's end.
    """

    def __init__(
        self, read: Callable[[], bool] | None = None, clock: Callable[[], float] = awake_s
    ) -> None:
        """`read` looks, in a thread of its own: a battery's controller may take its time."""
        self._read = read if read is not None else on_mains
        self._clock = clock
        self._look_at = 0.0
        self._is_on_mains = True

    def is_on_mains(self) -> bool:
        """Return what is known, and have another look begun where that is old. Never blocks."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            threading.Thread(target=self._look, name="power source", daemon=True).start()
        return self._is_on_mains

    def _look(self) -> None:
        self._is_on_mains = self._read()


def on_mains() -> bool:
    """Return whether the machine runs on mains power now. Any thread; may block for some ms."""
    try:
        return _on_mains_macos() if sys.platform == "darwin" else linux_on_mains(_SUPPLIES)
    except (OSError, AttributeError):  # no such framework, or no such function in it
        return True


def _on_mains_macos() -> bool:
    """Source: IOKit/ps/IOPowerSources.h, since macOS 10.7. -1 is a battery just taken into use."""
    estimate = ctypes.CDLL(_IOKIT).IOPSGetTimeRemainingEstimate
    estimate.restype = ctypes.c_double
    return bool(estimate() == _UNLIMITED)


def linux_on_mains(supplies: Path) -> bool:
    """Return whether no battery of the machine is discharging, or a supply is plugged in.

    Source: Documentation/ABI/testing/sysfs-class-power. A mouse's battery has the scope Device.
    """
    if not supplies.is_dir():
        return True
    found = [each for each in supplies.iterdir() if _text(each / "scope") != "Device"]
    if any(_text(each / "online") not in ("", "0") for each in found):
        return True
    return not any(_text(each / "status") == "Discharging" for each in found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # this supply does not tell it
        return ""
