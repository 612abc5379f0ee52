"""A prompt is searched once on its way to a slot, and again only where what is kept changed."""

from typing import Any

import pytest

from hearth.worker.cache.prefix_search import FoundPrefix, PrefixSearch
from scripts.harness.socketless_worker import machine
from tests.helpers.by_day import by_day
from tests.helpers.worker.kv_prompts import KINDS, follow, prompt


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the prompts that are searched from now on."""
    found: list[Any] = []
    run = PrefixSearch.run

    def counted(search: PrefixSearch) -> FoundPrefix:
        found.append(search._query)
        return run(search)

    monkeypatch.setattr(PrefixSearch, "run", counted)
    return found


@pytest.mark.parametrize("name", by_day(KINDS, ("qwen3_5", "gpt_oss")))
@pytest.mark.parametrize("slots_max", [1, 2], ids=["given away", "its own slot"])
def test_a_warm_request_is_searched_once(searches: list[Any], name: str, slots_max: int) -> None:
    warm = machine(name, tiny=True, slots_max=slots_max)
    ids = prompt(name, 150, 100)
    answer = warm.ask(ids, 4)
    warm.ask(prompt(name, 150, 100, seed=3), 4)
    searches.clear()
    again = warm.ask(follow(name, ids, answer.tokens, 30), 4)
    assert again.usage is not None and again.cached > 200
    assert again.usage.source == ("slot" if slots_max > 1 else "ram")
    assert len(searches) == 1
