"""A suite runs from its archive to its judgement, and only a rule that fits excuses a failure."""

import os
import shutil
import subprocess
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given, strategies as st

from scripts.nightly import __main__ as nightly

pytestmark = pytest.mark.process

RULES = [{"suites": "s|t", "tests": r".*::test_known|t\d", "text": "404", "why": "No such."}]
NAMES = st.from_regex(r"[a-z0-9_]{1,12}", fullmatch=True)
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), max_size=80)
KINDS = st.sampled_from(("", "failure", "error", "skipped"))


# ---------------------------------------------------------------- what is told


@given(st.dictionaries(NAMES, st.tuples(KINDS, TEXTS), max_size=6))
def test_pytests_report_is_read_test_by_test(tests: dict[str, tuple[str, str]]) -> None:
    cases = []
    for name, (kind, text) in tests.items():
        inner = f"<{kind} message={quoteattr(text)}></{kind}>" if kind else ""
        cases.append(f'<testcase classname="tests.a.B" name="{name}">{inner}</testcase>')
    xml = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
    found = dict(nightly.junit_outcomes(xml))
    assert list(found) == [f"tests.a.B::{name}" for name in tests]
    for why, (kind, text) in zip(found.values(), tests.values(), strict=True):
        assert why is None if not kind else why is not None and why.startswith(text)


def test_both_forms_of_a_summary_are_read_and_the_last_line_of_a_check_counts() -> None:
    text = """=== Test 1 ===
FAIL: not a line of the summary
  1_plain: FAIL: first
  Round 1/5: FAIL
  1_plain: PASS
  6_structured: SKIP: no package
  FAIL  Long generation
  PASS  Rapid fire
  5/8 passed
"""
    assert nightly.summary_outcomes(text) == [
        ("1_plain", None),
        ("6_structured", "no package"),
        ("Long generation", ""),
        ("Rapid fire", None),
    ]


def test_a_rule_excuses_what_fits_it_and_nothing_else() -> None:
    assert nightly.is_known("s", ("t1", "Error code: 404"), RULES)
    assert nightly.is_known("t", ("t1", "Error code: 404"), RULES)
    for suite, test, why in (("x", "t1", "404"), ("s", "t12", "404"), ("s", "t1", "400")):
        assert not nightly.is_known(suite, (test, why), RULES)


@pytest.mark.parametrize(
    "text",
    [
        "openai.InternalServerError: Error code: 500 - {}",
        "anthropic.APIStatusError: Error code: 529 - {}",
        "httpx.HTTPStatusError: Server error '503 Service Unavailable' for url",
        "requests.exceptions.HTTPError: 500 Server Error: x for url",
        "status_code: 502, model_name: local",
    ],
)
def test_no_rule_excuses_a_failing_server(text: str) -> None:
    every = [{"suites": ".*", "tests": ".*", "text": "", "why": "all"}]
    assert not nightly.is_known("s", ("t", text), every)
    assert nightly.is_known("s", ("t", "no"), every)


# ---------------------------------------------------------------- what is run


def test_no_process_of_a_night_is_started_with_a_key(tmp_path: Path) -> None:
    for name in (".ci", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    script = Path(shutil.copy((Path(__file__).parents[4] / ".ci") / "nightly", tmp_path / ".ci"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\nenv; echo "$@"\n')
    python.chmod(0o700)
    given = {"PATH": os.environ["PATH"], "HOME": "/h", "PIP_X": "/u v", "https_proxy": "p"}
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
