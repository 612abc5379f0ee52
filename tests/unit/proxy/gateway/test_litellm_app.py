"""Checks that the garbage collector rests during LiteLLM's import and runs again after it."""

import gc
from collections.abc import Iterator

import pytest

from hearth.proxy.gateway.litellm_app import without_collecting


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_imported_is_looked_through_neither_then_nor_later() -> None:
    before = gc.get_freeze_count()
    with without_collecting():
        assert not gc.isenabled()
        made = [[number] for number in range(1_000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), without_collecting():
        raise ImportError
    assert gc.isenabled()
