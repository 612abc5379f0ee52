"""A server at rest is watched, not asked."""

import asyncio

import pytest

from hearth.commands.bench.workloads.server_lives import at_rest
from tests.helpers.bench.played_visits import Played, made_visit


def test_only_what_a_server_does_by_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played().put_in(monkeypatch, at_rest)
    played.found = {"read_tokens": 5.0, "cpu_s": 0.1, "wall_s": 10.0, "idle_tokens": 5.0}
    monkeypatch.setattr(at_rest, "WATCH_S", 0.0)
    found = asyncio.run(at_rest.run(made_visit()))
    assert found.values == {"read_tokens": 5.0, "cpu_s": 0.1} and played.rows == []


def test_processes_of_a_server_by_url_are_nobodys_to_watch() -> None:
    found = asyncio.run(at_rest.run(made_visit("http://127.0.0.1:1")))
    assert not found.values and found.errors
