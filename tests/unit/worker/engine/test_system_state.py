"""Tells mains from battery, as Linux's files say it, and never has its owner wait."""

import threading
from pathlib import Path
from unittest import mock

import pytest

from hearth.worker.engine.system_state import LOOK_S, PowerSource, linux_on_mains, on_mains

DEAD_MOUSE = {"scope": "Device", "status": "Discharging"}


@pytest.mark.parametrize(
    ("supplies", "is_on"),
    [
        ({}, True),
        ({"BAT0": {"status": "Discharging"}}, False),
        ({"BAT0": {"status": "Charging"}}, True),
        ({"AC": {"online": "0"}, "BAT0": {"status": "Discharging"}}, False),
        ({"AC": {"online": "1"}, "BAT0": {"status": "Discharging"}}, True),
        ({"AC": {"online": "1"}, "BAT0": {"status": "Full"}}, True),
        ({"hidpp": DEAD_MOUSE}, True),
        ({"hidpp": DEAD_MOUSE, "BAT1": {"status": "Discharging"}}, False),
        ({"odd": {}}, True),
    ],
)
def test_a_battery_that_is_discharging_with_nothing_plugged_in_is_no_mains(
    supplies: dict[str, dict[str, str]], is_on: bool, tmp_path: Path
) -> None:
    for name, files in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text + "\n")
    assert linux_on_mains(tmp_path) is is_on


def test_what_the_system_does_not_say_is_mains(tmp_path: Path) -> None:
    assert linux_on_mains(tmp_path / "none")


def test_a_mac_is_asked_for_what_its_batteries_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    for estimate, is_on in ((-2.0, True), (-1.0, False), (5400.0, False)):
        kit = mock.Mock(IOPSGetTimeRemainingEstimate=mock.Mock(return_value=estimate))
        monkeypatch.setattr("ctypes.CDLL", lambda _path, kit=kit: kit)
        assert on_mains() is is_on
    monkeypatch.setattr("ctypes.CDLL", lambda _path: object())
    assert on_mains(), "a system without that function is taken to be on mains"


def end_of_looks() -> None:
    for thread in threading.enumerate():
        if thread.name == "power source":
            thread.join(60)


def test_its_owner_never_waits_and_looks_are_rare() -> None:
    now, looks = 100.0, 0
    may_end = threading.Event()

    def read() -> bool:
        nonlocal looks
        looks += 1
        return not may_end.wait(60)

    power = PowerSource(read, lambda: now)
    assert power.is_on_mains() and power.is_on_mains(), "nothing is known before the first look"
    may_end.set()
    end_of_looks()
    assert not power.is_on_mains() and looks == 1
    now += LOOK_S
    power.is_on_mains()
    end_of_looks()
    assert looks == 2
