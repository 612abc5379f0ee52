"""Checks the parts of the trial of a newer LiteLLM: what is asked of pip, what is run and told."""

from pathlib import Path

import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from scripts import litellm_newest
from scripts.litellm_newest import NotTried, Outcome

INDEX = """litellm (1.109.1)
Available versions: 1.109.1, 1.106.10, 1.106.2
  INSTALLED: 1.106.2
  LATEST:    1.109.1
"""
REPORT = """<testsuites><testsuite tests="4">
<testcase classname="a.test_x" name="test_good" />
<testcase classname="a.test_x" name="test_bad"><failure message="assert 1 == 2&#10;more">t</failure></testcase>
<testcase classname="a.test_x" name="test_gone"><error message="ImportError: no x">t</error></testcase>
<testcase classname="a.test_x" name="test_left"><skipped /></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_the_newest_version_is_the_one_that_pip_names_first() -> None:
    assert litellm_newest.newest_in(INDEX) == "1.109.1"
    with pytest.raises(NotTried, match="No matching"):
        litellm_newest.newest_in("ERROR: No matching distribution found for litellm")


def test_a_wheel_needs_no_network() -> None:
    command = litellm_newest.pip_command(Path("/d"), "/w.whl", is_file=True)
    assert {"--no-index", "--no-deps"} < set(command) and command[-1] == "/w.whl"
    assert "--no-deps" not in litellm_newest.pip_command(Path("/d"), "litellm==2", is_file=False)


def test_the_tests_of_the_gateway_are_run_and_the_one_of_the_pin_is_not() -> None:
    few = litellm_newest.test_command(Path("/r.xml"), whole=False)
    assert set(litellm_newest.TESTS) < set(few) and "tests/e2e/gateway" not in few
    assert "tests/e2e/gateway" in litellm_newest.test_command(Path("/r.xml"), whole=True)
    for name in (*litellm_newest.TESTS, *litellm_newest.WHOLE_TESTS):
        assert (PROJECT_DIR / name).is_dir()
    path, _, test = litellm_newest.LEFT_OUT.partition("::")
    assert f"def {test}(" in (PROJECT_DIR / path).read_text() and litellm_newest.LEFT_OUT in few


def test_the_report_names_what_broke_and_why() -> None:
    outcome = litellm_newest.outcome_in(REPORT)
    assert outcome == Outcome(
        1, ("a.test_x::test_bad: assert 1 == 2", "a.test_x::test_gone: ImportError: no x")
    )
    assert outcome.report("1.109.1").splitlines() == [
        "LiteLLM 1.109.1: 1 tests passed, 2 broke",
        "  a.test_x::test_bad: assert 1 == 2",
        "  a.test_x::test_gone: ImportError: no x",
    ]


def test_the_version_is_read_where_it_was_installed(tmp_path: Path) -> None:
    (tmp_path / "litellm-1.109.1.dist-info").mkdir()
    assert litellm_newest.version_in(tmp_path) == "1.109.1"
    with pytest.raises(NotTried):
        litellm_newest.version_in(tmp_path / "gone")


@pytest.mark.process
def test_a_wheel_that_is_none_says_so_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "litellm-9.9.9-py3-none-any.whl"
    wheel.write_text("no wheel")
    assert litellm_newest.main(["--wheel", str(wheel)]) == 2
    assert "pip install failed" in capsys.readouterr().err
