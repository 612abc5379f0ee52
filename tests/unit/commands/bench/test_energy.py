"""Energy is added up from what RAPL and powermetrics say."""

import io
import plistlib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.energy import (
    NoCounter,
    PowermetricsCounter,
    RaplCounter,
    plists,
    rapl_packages,
    sample_joules,
)

RANGE = 1_000


def package(place: Path, name: str, energy: int | str) -> Path:
    made = place / name
    made.mkdir()
    (made / "energy_uj").write_text(f"{energy}\n")
    (made / "max_energy_range_uj").write_text(f"{RANGE}\n")
    return made


def test_the_packages_are_found_and_not_their_parts(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:1", 5)
    package(tmp_path, "intel-rapl:0", 5)
    package(tmp_path, "intel-rapl:0:0", 5)
    package(tmp_path, "intel-rapl:2", "closed")
    assert [each.name for each in rapl_packages(tmp_path)] == ["intel-rapl:0", "intel-rapl:1"]
    assert rapl_packages(tmp_path / "none") == []


def test_counters_that_wrap_around_go_on(tmp_path: Path) -> None:
    one, other = package(tmp_path, "intel-rapl:0", 900), package(tmp_path, "intel-rapl:1", 10)
    counter = RaplCounter([one, other])
    assert counter.joules() == 0
    (one / "energy_uj").write_text("200")
    (other / "energy_uj").write_text("15")
    assert counter.joules() == pytest.approx((300 + 5) / 1e6)
    (one / "energy_uj").unlink()
    assert counter.joules() is None


def sample(power_mw: float, elapsed_ns: int) -> bytes:
    """A sample as powermetrics writes it on Apple Silicon, of what is read alone."""
    told = {
        "is_delta": True,
        "elapsed_ns": elapsed_ns,
        "hw_model": "Mac15,9",
        "processor": {"cpu_power": power_mw / 2, "combined_power": power_mw},
    }
    return plistlib.dumps(told)


def test_a_sample_is_power_times_time() -> None:
    assert sample_joules(sample(20_000.0, 250_000_000)) == pytest.approx(5.0)
    assert sample_joules(b"\n" + sample(8.0, 10**9)) == pytest.approx(0.008)


@pytest.mark.parametrize(
    "broken",
    [b"", b"<plist>", b"nonsense", sample(1, 1)[:-20], plistlib.dumps({"processor": {}})],
)
def test_a_sample_that_tells_nothing_counts_nothing(broken: bytes) -> None:
    assert sample_joules(broken) == 0.0


class Slowly(io.RawIOBase):
    """Gives what a pipe gives: as much as there happens to be."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data = io.BytesIO(data)
        self._sizes = sizes

    def read(self, most: int = -1) -> bytes:
        return self._data.read(min(most, self._sizes.pop(0)) if self._sizes else most)


@given(
    st.lists(st.binary(min_size=1, max_size=9).filter(lambda each: b"\0" not in each)),
    st.lists(st.integers(1, 9)),
)
def test_samples_are_parted_wherever_the_pipe_cuts(parts: list[bytes], sizes: list[int]) -> None:
    data = b"".join(part + b"\0" for part in parts)
    assert list(plists(Slowly(data, sizes))) == parts  # type: ignore[arg-type]


def test_what_never_ends_is_given_up() -> None:
    with pytest.raises(ValueError, match="no end"):
        list(plists(io.BytesIO(b"x" * (5 << 20))))


def test_powermetrics_samples_are_added_up() -> None:
    counter = PowermetricsCounter(io.BytesIO(b"\0".join([sample(4_000, 10**9)] * 3) + b"\0"))
    counter.wait()
    assert counter.joules() == pytest.approx(12.0)
    silent = PowermetricsCounter(io.BytesIO())
    silent.wait()
    assert silent.joules() is None
    assert NoCounter().joules() is None
