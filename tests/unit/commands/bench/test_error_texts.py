"""Errors in the bench's files: short, and without paths, hosts and users."""

import getpass
import platform
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.rounds.error_texts import CHARS_MAX, error_text

PLACES = {Path("/data/models/Qwen-7B"): "{model}", Path("/tmp/run-1"): "{dir}"}


@pytest.fixture(autouse=True)
def anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no word of these errors be the name of whoever runs the tests, or of the machine."""
    monkeypatch.setattr(platform, "node", lambda: "anns-macbook.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/ann"))


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("cannot read /data/models/Qwen-7B/config.json", "cannot read {model}/config.json"),
        ('File "/usr/lib/python3/asyncio/x.py", line 3', 'File "x.py", line 3'),
        ("POST /v1/chat/completions is 500", "POST /v1/chat/completions is 500"),
        ("at http://10.0.0.7:8000/v1/models", "at http://{host}/v1/models"),
        ("~/secret/plans/a.txt is missing", "a.txt is missing"),
        ("OSError:/data/anna/plans/a.txt", "OSError:a.txt"),
        ("model:~/secret/plans/a.txt", "model:a.txt"),
        ("two\n  lines", "two lines"),
        ("open file:///Users/anna/secret/m.json failed", "open m.json failed"),
        ("No such file:/home/anna/secret/x", "No such file:x"),
        ("peer ('192.168.1.5', 53211) left", "peer ('{host}', 53211) left"),
        ("127.0.0.1:8000 and 0.0.0.0 are anybody's", "127.0.0.1:8000 and 0.0.0.0 are anybody's"),
        ("fe80::1ff:fe23:4567:890a at 09:53:33", "{host} at 09:53:33"),
        ("from https://user:token@index/simple", "from https://{host}/simple"),
        ("\x1b[31mred\x1b[0m \x07 \u202ebell", "red \ufffd \ufffdbell"),
        ("and/or 3 tokens/s", "and/or 3 tokens/s"),
    ],
)
def test_no_place_is_told(text: str, shared: str) -> None:
    assert error_text(text, PLACES) == shared


@given(
    st.text("ab .:'", max_size=8),
    st.lists(st.text("secretXYZ0-_.", min_size=1), min_size=2, max_size=5),
    st.text(" '\",)x", max_size=5),
)
def test_of_a_path_no_folder_is_told(before: str, parts: list[str], behind: str) -> None:
    path = f"/Private{'/'.join(parts)}/model"
    for text in (f"{before} {path}{behind}", f"{before}:{path}", f"at file://{path}", f"({path})"):
        told = error_text(text, {})
        assert "Private" not in told and "secret" not in told


def test_home_user_and_host_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "annas-macbook.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    told = error_text("anna at annas-macbook.local has no annas", {})
    assert told == "{user} at {host} has no annas"


@pytest.mark.parametrize("said", ["annas-macbook", "ANNAS-MacBook.local", "annas-macbook.lan"])
def test_a_host_is_not_told_by_its_short_name(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "annas-macbook.local")
    assert "anna" not in error_text(f"bound to {said}:8000", {}).lower()
    monkeypatch.setattr(platform, "node", lambda: "Mac.local")
    assert error_text("it needs a Mac", {}) == "it needs a Mac"


def test_a_home_of_another_name_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "service")
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/anna"))
    assert error_text("no key of Anna", {}) == "no key of {user}"


def test_an_exception_is_told_by_its_name() -> None:
    assert error_text(TimeoutError(), {}) == "TimeoutError"
    assert error_text(ValueError("no"), {}) == "ValueError: no"


@given(st.text())
def test_an_error_is_one_short_line(text: str) -> None:
    told = error_text(text, PLACES)
    assert len(told) <= CHARS_MAX and "\n" not in told


@given(st.text(min_size=CHARS_MAX * 2, alphabet=st.characters(codec="ascii", categories=["L"])))
def test_the_end_of_a_long_text_is_kept(text: str) -> None:
    assert error_text(text + "the cause", {}).endswith("the cause")
