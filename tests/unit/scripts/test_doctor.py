"""The command `hearth doctor` without a server: it loads the model, checks it and tells."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from hearth.commands import doctor
from hearth.worker.doctor.check_context import CheckContext, Steps
from hearth.worker.doctor.findings import FOLDER
from hearth.worker.doctor.measure_speed import SPEED, measure_speed
from hearth.worker.doctor.run_checks import CheckRun
from hearth.worker.setup import doctor_setup
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import free_port


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the cache's directory of a machine without a server, whose settings are defaults.

    The command limits MLX for its own process, which is the tests' here.
    """
    limit = mx.get_memory_limit()
    settings = {"KV_CACHE_DIR": str(tmp_path / "kv"), "PROXY_PORT": str(free_port())}
    for name, value in {
        **settings,
        "MODEL_PATH": str(fixture_dir("qwen3")),
        "LD_PRELOAD": "none",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hearth.commands.doctor.openblas_environment", lambda _: {})
    yield tmp_path / "kv"
    mx.set_memory_limit(limit)


def only(monkeypatch: pytest.MonkeyPatch, verdict: Any) -> None:
    """Have the checks be a measurement, and one that comes to `verdict`."""

    def judge(context: CheckContext) -> Steps:
        context.begin_stage("exact")
        yield
        context.report(verdict, {"tokens": 80}, "as planted" if verdict == "fault" else "")

    def make(*arguments: Any) -> CheckRun:
        run = real(*arguments)
        return CheckRun(run.context, run.subject, ((measure_speed, (SPEED,)), (judge, ("exact",))))

    real = doctor_setup.check_run
    monkeypatch.setattr(doctor_setup, "check_run", make)


@pytest.mark.parametrize(("verdict", "status"), [("ok", 0), ("differs", 0), ("fault", 1)])
def test_it_checks_here_where_no_server_runs_and_keeps_what_it_found(
    machine: Path,
    verdict: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only(monkeypatch, verdict)
    assert doctor.main([]) == status
    shown = capsys.readouterr()
    assert "- model: a local checkpoint" in shown.out and f"| {verdict} |" in shown.out
    assert ("Faults: exact." in shown.out) == (verdict == "fault")
    assert shown.err.split() == ["speed", "exact"], "what it is doing"
    assert str(Path.home()) not in shown.out
    assert len(list((machine / FOLDER).glob("*.json"))) == 1


def test_a_model_over_ranks_is_not_loaded_whole(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKS", "2")
    assert doctor.main([]) == 2
    assert "hearth ranks check compares the ranks" in capsys.readouterr().err
    assert not machine.exists()
