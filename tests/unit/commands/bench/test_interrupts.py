"""A run ends in order on signals, and two runs never write one file."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.commands.bench.rounds import command
from hearth.commands.bench.rounds.file_lock import has_other_runs, sole_writer
from hearth.commands.bench.rounds.interrupts import SIGNALS, interrupts, run_interruptible
from hearth.shared.errors import StartError

pytestmark = pytest.mark.process


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_what_is_awaited_with_what_it_has_started(
    number: signal.Signals, request: pytest.FixtureRequest
) -> None:
    held = signal.signal(number, signal.SIG_DFL)  # a suite below nohup ignores one
    request.addfinalizer(lambda: signal.signal(number, held))
    ended = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with interrupts():
        with pytest.raises(KeyboardInterrupt):
            run_interruptible(work())
        assert ended == [True]
        with pytest.raises(KeyboardInterrupt):  # the next one too: the loop has reset it
            os.kill(os.getpid(), number)


def test_what_is_ignored_stays_so_and_the_rest_is_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    held = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:

        async def work() -> str:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            return "done"

        with interrupts():
            assert run_interruptible(work()) == "done"
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, held)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where results lie; locks lie in a folder beside."""
    (tmp_path / "locks").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "locks"))
    return tmp_path


def test_one_file_has_one_writer_at_a_time_and_no_lock_is_left(places: Path) -> None:
    with sole_writer(places / "a.json"):
        with sole_writer(places / "b.json"):
            pass
        with (
            pytest.raises(StartError, match=r"Another `hearth bench` writes .*a\.json"),
            sole_writer(places / "." / "a.json"),
        ):
            raise AssertionError("two write it")
        with contextlib.suppress(StartError), sole_writer(places / "a.json"):
            raise AssertionError("the one that was refused has let it go")
    with sole_writer(places / "a.json"):
        assert [oct(each.stat().st_mode)[-3:] for each in (places / "locks").iterdir()] == ["600"]
    assert not list((places / "locks").iterdir())


def test_a_run_beside_another_is_told(places: Path) -> None:
    mine, other = places / "a.json", places / "b.json"
    with sole_writer(mine):
        assert not has_other_runs(mine) and has_other_runs(other)
        with sole_writer(other):
            assert has_other_runs(mine)
    (places / "locks" / f"hearth-bench-{os.getuid()}-0.lock").touch()  # its process has ended
    assert not has_other_runs(other)


def test_a_lock_ends_with_its_process(places: Path) -> None:
    path = places / "a.json"
    code = (
        "import os, sys, tempfile; from pathlib import Path;"
        "from hearth.commands.bench.rounds.file_lock import sole_writer;"
        "tempfile.tempdir = sys.argv[2]\n"
        "with sole_writer(Path(sys.argv[1])): os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path), tempfile.gettempdir()])
    assert done.returncode == 9 and len(list((places / "locks").iterdir())) == 1
    with sole_writer(path):
        pass


@pytest.mark.parametrize("more", [[], ["--html", "x/../r.html"]])
def test_the_page_never_replaces_the_results(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for option in ("--json", "--page"):
        Path("r.html").write_text("results")
        monkeypatch.setattr(command.Results, "load", lambda path: None)
        assert command.main([option, "r.html", *more]) == command.CANNOT_BEGIN
        assert "would replace r.html" in capsys.readouterr().err
        assert Path("r.html").read_text() == "results"


def raises(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_run_that_is_interrupted_before_it_begins_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_plan", raises(KeyboardInterrupt()))
    assert command.main(["--json", str(tmp_path / "a.json")]) == command.INTERRUPTED
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize("text", ["[]", "{", '{"format": 1, "models": 3}', "[" * 100_000])
def test_a_strangers_file_is_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    for given in (["--page", str(path)], ["--compare", str(path), str(path)]):
        assert command.main(given) == command.CANNOT_BEGIN
        told = capsys.readouterr().err
        assert "no file of `hearth bench`" in told and told.count("\n") == 1
