"""Checks that a request goes to the worker with its longest known prefix, unless it is too busy."""

from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.pool import worker_pool
from hearth.proxy.pool.worker_pool import CacheAffinity, affinity_keys_of
from hearth.shared.wire_messages import MessageName, Prompt, Speaker, linked


@dataclass
class Worker:
    worker_id: int
    load: int = 0


def prompt(words: str, session: str = "", key: str = "k") -> Prompt:
    """A conversation with a message for each word; "-" is one that comes and goes."""
    names = (MessageName(b"" if word == "-" else word.encode(), b"") for word in words.split())
    return Prompt([], speaker=Speaker(key, session), names=linked(names))


def chosen(affinity: CacheAffinity, given: Prompt, *loads: int) -> int:
    workers = [Worker(number, load) for number, load in enumerate(loads)]
    found = affinity.choose(workers, affinity_keys_of(given))
    assert found is not None
    return found.worker_id


def knowing(**sent: int) -> CacheAffinity:
    """Return what has sent each conversation to its worker, its words joined by underscores."""
    affinity = CacheAffinity(4)
    for words, worker_id in sent.items():
        affinity.remember(affinity_keys_of(prompt(words.replace("_", " "))), worker_id)
    return affinity


def test_a_message_that_comes_and_goes_changes_nothing() -> None:
    affinity = CacheAffinity(4)
    affinity.remember(affinity_keys_of(prompt("s a -")), 1)
    assert chosen(affinity, prompt("s a b -"), 0, 0) == 1
    assert affinity_keys_of(prompt("s - a")) == affinity_keys_of(prompt("s a"))


def test_a_session_that_begins_anew_stays_with_its_worker() -> None:
    affinity = CacheAffinity(4)
    affinity.remember(affinity_keys_of(prompt("s a", "one")), 1)
    assert chosen(affinity, prompt("t b", "one"), 0, 0) == 1
    assert chosen(affinity, prompt("t b", "two"), 0, 0) == 0
    affinity.remember(affinity_keys_of(prompt("t", "two")), 0)
    assert chosen(affinity, prompt("t b", "one"), 0, 0) == 0, "a prefix counts more"


def test_nothing_is_found_by_another_api_key() -> None:
    affinity = CacheAffinity(4)
    affinity.remember(affinity_keys_of(prompt("s a", "one")), 1)
    assert chosen(affinity, prompt("s a", "one", key="other"), 0, 0) == 0
    assert not set(affinity_keys_of(prompt("s", "one"))) & set(
        affinity_keys_of(prompt("s", "one", key=""))
    )


def test_a_worker_that_is_not_ready_leaves_it_to_a_shorter_prefix() -> None:
    affinity = knowing(s_a=2, s_a_b=7)
    assert chosen(affinity, prompt("s a b c"), 0, 0, 0) == 2
    assert affinity.choose([], affinity_keys_of(prompt("s a b c"))) is None


def test_a_worker_that_is_gone_is_forgotten_and_the_others_are_not() -> None:
    affinity = knowing(s_a=1, t_a=2)
    affinity.forget(1)
    assert chosen(affinity, prompt("s a b"), 0, 0, 0) == 0
    assert chosen(affinity, prompt("t a b"), 0, 0, 0) == 2


def test_the_marks_are_bounded_and_those_of_shared_prefixes_go_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "MARKS_MAX", 3)
    affinity = knowing(s_a_b_c_d=1)
    assert len(affinity.worker_ids) == 3
    assert chosen(affinity, prompt("s x"), 0, 0) == 1
    affinity.remember(affinity_keys_of(prompt("s t u")), 0)
    assert len(affinity.worker_ids) == 3


@given(
    st.lists(st.tuples(st.text("ab -", max_size=8), st.integers(0, 3)), max_size=8),
    st.text("ab -", max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_a_choice_is_ready_and_within_the_gap_and_follows_what_was_sent_first(
    sent: list[tuple[str, int]], asked: str, loads: list[int]
) -> None:
    affinity = CacheAffinity(4)
    holder: dict[tuple[str, ...], int] = {}
    for words, worker_id in sent:
        affinity.remember(affinity_keys_of(prompt(words)), worker_id)
        kept = [word for word in words.split() if word != "-"]
        sent_now = {tuple(kept[: end + 1]): worker_id for end in range(len(kept))}
        holder = sent_now | holder
    found = chosen(affinity, prompt(asked), *loads)
    idle = min(range(len(loads)), key=lambda row: (loads[row], row))
    assert loads[found] - loads[idle] <= 4
    want = [word for word in asked.split() if word != "-"]
    known = [holder.get(tuple(want[:end])) for end in range(len(want), 0, -1)]
    best = next((row for row in known if row is not None and row < len(loads)), idle)
    assert found == (best if loads[best] - loads[idle] <= 4 else idle)


def test_nothing_of_one_model_is_found_by_another() -> None:
    conversation = prompt("s a b", "one")
    assert not set(affinity_keys_of(conversation, "a")) & set(affinity_keys_of(conversation, "b"))
    affinity = CacheAffinity(4)
    affinity.remember(affinity_keys_of(conversation, "a"), 0)
    affinity.remember(affinity_keys_of(conversation, "b"), 2)
    workers = [Worker(number) for number in range(3)]
    found = affinity.choose(workers, affinity_keys_of(conversation, "b"))
    assert found is not None
    assert found.worker_id == 2
