"""A suite's command, address and environment are what it is described by."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.nightly.environments import directory_of, variables
from scripts.nightly.run_suites import Night, command_of, logged_errors
from scripts.nightly.sources import FetchError, place_address
from scripts.nightly.suites import AGENTS, SUITES, Kind, Origin, Suite

CI_DIR = Path(__file__).parents[4] / ".ci"
BY_NAME = {suite.name: suite for suite in SUITES}


def night(work_dir: Path) -> Night:
    return Night(4321, work_dir, None, (), is_pocket=True)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_each_suite_is_pinned_and_told_where_the_server_is(suite: Suite, tmp_path: Path) -> None:
    command = command_of(suite, Path("python"), night(tmp_path), tmp_path / "report.xml")

    told = [*command, *suite.environment.values(), *(new for _, new in suite.replaced)]
    assert any("{url}" in word or "4321" in word for word in told)
    assert len(suite.source.version) == 40 or suite.source.origin is Origin.SDIST
    assert all("==" in package for package in suite.packages.requirements)
    is_pytest = suite.kind is Kind.PYTEST
    assert ("-m" in command) is is_pytest
    assert any(word.startswith("--junitxml") for word in command) is is_pytest


def test_a_fixed_address_is_replaced_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    suite = replace(BY_NAME["rapid-tools"], arguments=("program",))
    program = tmp_path / "program"
    program.write_text('BASE_URL = "http://localhost:8000/v1"')

    place_address(suite, tmp_path, "http://127.0.0.1:4321")

    assert program.read_text() == 'BASE_URL = "http://127.0.0.1:4321/v1"'
    with pytest.raises(FetchError, match="any more"):
        place_address(suite, tmp_path, "http://127.0.0.1:4321")


def test_suites_see_no_key_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://secret")

    assert "secret" not in " ".join(variables(tmp_path).values())
    assert variables(tmp_path)["HOME"] == str(tmp_path)


@pytest.mark.process
def test_no_process_of_a_night_is_started_with_a_key(tmp_path: Path) -> None:
    for name in (".ci", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    script = Path(shutil.copy(CI_DIR / "nightly", tmp_path / ".ci"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nenv; echo "$@"\n')
    python.chmod(0o700)
    given = {"PATH": os.environ["PATH"], "HOME": "/h", "UV_CACHE_DIR": "/u v", "https_proxy": "p"}
    keys = {"OPENAI_API_KEY": "secret", "PROXY_API_KEY": "secret", "GITHUB_TOKEN": "secret"}
    done = subprocess.run(
        [str(script), "--suite", "a b"],
        env=given | keys,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "secret" not in done.stdout and done.stdout.endswith("scripts.nightly --suite a b\n")
    assert all(f"{name}={value}\n" in done.stdout for name, value in given.items())


def test_other_packages_are_another_environment(tmp_path: Path) -> None:
    other = replace(AGENTS, requirements=(*AGENTS.requirements, "more==1"))

    assert directory_of(AGENTS, tmp_path) != directory_of(other, tmp_path)
    assert directory_of(AGENTS, tmp_path) == directory_of(AGENTS, tmp_path)


def test_errors_in_hearths_log_are_found() -> None:
    log = (
        "09:53:33 proxy I request id=1 E x\n09:53:34 worker-0 E broke\n"
        "Traceback (most recent call last):\n09:53:35 proxy W slow\n"
    )

    assert logged_errors(log) == [
        "09:53:34 worker-0 E broke",
        "Traceback (most recent call last):",
    ]
