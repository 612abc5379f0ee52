"""Tests for shared/open_files.py: as many files as are wanted, no fewer than are needed."""

import resource

import pytest

from hearth.shared.errors import StartError
from hearth.shared.open_files import raise_open_file_limit

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "then"),
    [
        ((256, NO_LIMIT), (4096, NO_LIMIT)),  # macOS
        ((1024, 1024), (1024, 1024)),
        ((256, 1024), (1024, 1024)),
        ((1024, 1 << 20), (4096, 1 << 20)),
        ((8192, 1 << 20), (8192, 1 << 20)),
        ((NO_LIMIT, NO_LIMIT), (NO_LIMIT, NO_LIMIT)),
        ((128, 128), (128, 128)),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_is_wanted_and_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], then: tuple[int, int]
) -> None:
    now = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: now[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: now.append(to))
    assert raise_open_file_limit(4096, 128) == then[0]
    assert now[-1] == then


def test_too_low_a_hard_limit_is_refused_with_the_figures_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (127, 127))
    with pytest.raises(StartError, match=r"127 files .* needs 128\. .*ulimit -Hn .*NumberOfFiles"):
        raise_open_file_limit(4096, 128)
