"""Counts what idle time reads: by default nothing that was read before."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hearth.shared.suspects import SuspectStore, take_running
from hearth.worker.cache.block_hash import prefix_hashes
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.image_keys import keys_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.system_state import PowerSource
from hearth.worker.kv.kv_transfer import IdleMode
from hearth.worker.schedule.suspects import Suspects
from scripts.harness.socketless_worker import Answer, Machine, machine
from scripts.harness.store_builders import ROOT
from tests.helpers.by_day import by_day
from tests.helpers.worker.kv_prompts import follow, prompt

TURNS, NEW, GENERATED = 3, 90, 70
TWO_KINDS = ("qwen3", "qwen3_5")  # dense and hybrid


def session(warm: Machine, name: str) -> tuple[list[Answer], list[int]]:
    """Play a session with pauses; return its answers, and the prompt that would come next."""
    ids, answers = prompt(name, 100, 100), []
    for turn in range(TURNS):
        answers.append(warm.ask(ids, GENERATED))
        warm.work_ahead()
        ids = follow(name, ids, answers[-1].tokens, NEW, seed=turn)
    return answers, ids


def read_by_requests(answers: list[Answer]) -> int:
    return sum(answer.prefilled for answer in answers)


def foreseen(warm: Machine, ids: list[int], echo: list[int]) -> PrefixQuery:
    """Return the prompt that follows where the answer to `ids` is rendered as `echo`."""
    keys = keys_of([*ids, *echo], ())
    cuts = warm.rule.natural(keys)
    names = prefix_hashes(ROOT, keys, cuts)
    return PrefixQuery(keys, cuts, names, system_end=warm.rule.system_end(keys))


def counts(warm: Machine) -> tuple[int, int]:
    told = warm.scheduler.report()["idle"]
    return told["ahead"], told["again"]


# ---------------------------------------------------------------- a linear session


@pytest.mark.parametrize("name", by_day(TWO_KINDS, ("qwen3_5",)))
def test_a_session_with_pauses_reads_nothing_twice_by_default(name: str) -> None:
    warm = machine(name)
    answers, _ = session(warm, name)
    assert warm.scheduler.idle_tokens <= 0.05 * read_by_requests(answers)
    assert len(warm.keeper.slots) == 1, "it holds the session, and no copy of it"


# ---------------------------------------------------------------- reading ahead


@pytest.mark.parametrize("name", by_day(TWO_KINDS, ("qwen3_5",)))
def test_exact_mode_reads_the_answer_before_it_is_asked_and_once(name: str) -> None:
    ahead, never = (
        machine(name, is_exact=True, idle_prefill=mode) for mode in (IdleMode.AUTO, IdleMode.NEVER)
    )
    early, ids = session(ahead, name)
    late, _ = session(never, name)
    assert never.scheduler.idle_tokens == 0
    read, again = counts(ahead)
    assert read > 0 == again
    assert len(ahead.keeper.slots) == 1, "it is read in the session's own slot"
    last_pause = ahead.ask(ids, 2).prefilled - never.ask(ids, 2).prefilled
    total = read_by_requests(early) + read + last_pause
    assert total == read_by_requests(late), "not one token is read twice"
    for mine, theirs in zip(early[-1].logits, late[-1].logits, strict=True):
        assert np.array_equal(mine, theirs)
    ahead.check()


def test_reading_that_ended_a_worker_is_not_done_again(tmp_path: Path) -> None:
    store, socket_path = SuspectStore(tmp_path / "suspects"), tmp_path / "worker-0.sock"
    ids = prompt("qwen3", 150, 100)

    def started() -> Machine:
        warm = machine("qwen3", tiny=True, is_exact=True, suspects=Suspects(store, socket_path))
        warm.ask(ids, 100)
        return warm

    def dies(*_: object) -> None:
        raise RuntimeError("the worker ends")

    warm = started()
    warm.work_ahead()
    assert warm.scheduler.idle_tokens > 0 and not take_running(socket_path)
    warm = started()
    warm.engine.prefill = dies  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        warm.work_ahead()
    store.record_death(take_running(socket_path), "SIGABRT")
    warm = started()
    warm.work_ahead()
    assert warm.scheduler.idle_tokens == 0


def test_an_interrupted_reading_goes_on_where_it_was() -> None:
    warm = machine("qwen3", is_exact=True)
    ids = prompt("qwen3", 150, 100)
    answer = warm.ask(ids, 300)
    warm.work_ahead(2)
    first = warm.scheduler.idle_tokens
    warm.ask(prompt("qwen3", 60, 20, seed=3), 2)
    warm.work_ahead()
    assert 0 < first < warm.scheduler.idle_tokens
    longer = follow("qwen3", ids, answer.tokens, 30)
    assert warm.ask(longer, 2).prefilled < 64 + 64


@pytest.mark.parametrize("name", [*TWO_KINDS, "gpt_oss"])
def test_of_a_foreseen_prompt_that_is_read_which_its_request_would_read(name: str) -> None:
    ids, echo = prompt(name, 100, 100), prompt(name, 150)[:150]
    prefilled = {}
    for mode in (IdleMode.NEVER, IdleMode.AUTO):
        warm = machine(name, idle_prefill=mode)
        answer = warm.ask(ids, 60)
        rendered = [*answer.tokens[:20], *echo]  # the template writes another end
        warm.scheduler.prefill_later(foreseen(warm, ids, rendered))
        warm.work_ahead()
        asked = warm.ask([*ids, *rendered, *prompt(name, 40)], 4)
        prefilled[mode] = asked.prefilled
        warm.check()
        if mode is IdleMode.AUTO:
            read, again = counts(warm)
            assert read > 64 and again == 0
            assert asked.usage is not None and asked.usage.idle_tokens == read
            assert read + asked.prefilled == prefilled[IdleMode.NEVER]


def test_what_is_read_of_a_foreseen_prompt_is_kept_for_its_conversation() -> None:
    warm = machine("qwen3")
    query = foreseen(warm, prompt("qwen3", 100, 100), prompt("qwen3", 90))
    warm.scheduler.prefill_later(replace(query, conversation=Conversation(7, "s")))
    warm.work_ahead()
    assert warm.scheduler.idle_tokens > 0
    assert [(line.number, line.family) for line in warm.keeper.lines.all] == [(7, "s")]


def test_a_foreseen_prompt_that_was_asked_meanwhile_is_not_read() -> None:
    warm = machine("qwen3")
    ids = prompt("qwen3", 100, 100)
    warm.ask(ids, 20)
    query = foreseen(warm, ids, prompt("qwen3", 90))
    warm.ask([*query.tokens.tolist(), *prompt("qwen3", 40)], 4)
    warm.scheduler.prefill_later(query)
    warm.work_ahead()
    assert warm.scheduler.idle_tokens == 0


# ---------------------------------------------------------------- what is fast before the session


def test_a_trunk_that_is_fast_is_read_once_more() -> None:
    warm = machine("qwen3")
    ids = prompt("qwen3", 200, 100)
    warm.ask(ids, 20)
    for extent in list(warm.keeper.store.extents):
        warm.keeper.store.make_fast(extent)
    (slot,) = warm.keeper.slots
    slot.canonical_cuts.clear()
    again = warm.keeper.idle_work.unfinished(warm.rule.natural)
    assert again is not None and again.conversation.number == slot.line.number > 0
    warm.work_ahead()
    end = warm.rule.system_end(ids)
    assert counts(warm) == (0, end)
    warm.ask(prompt("qwen3", 200, 50, seed=0), 20)
    warm.work_ahead()
    assert counts(warm) == (0, end), "it is canonical from then on"
    warm.check()


# ---------------------------------------------------------------- the setting, and power


@pytest.mark.parametrize(
    ("mode", "on_mains", "reads"),
    [("never", True, False), ("auto", True, True), ("auto", False, False)],
)
def test_on_a_battery_idle_time_is_idle(mode: str, on_mains: bool, reads: bool) -> None:
    power = PowerSource(lambda: on_mains)
    power._read_source()  # else it would be known a moment later
    warm = machine("qwen3", is_exact=True, idle_prefill=IdleMode(mode), power=power)
    warm.ask(prompt("qwen3", 30, 40), GENERATED)
    warm.work_ahead()
    assert (warm.scheduler.idle_tokens > 0) is reads
    told = warm.scheduler.report()["idle"]
    assert (told["mode"], told["on_mains"]) == (mode, on_mains)


def test_a_session_is_told_what_was_read_for_it_and_no_other() -> None:
    warm = machine("qwen3", is_exact=True)
    answers, ids = session(warm, "qwen3")
    told = [answer.usage.idle_tokens for answer in answers if answer.usage is not None]
    assert told[0] == 0 and told == sorted(told) and told[-1] > 0
    last, other = warm.ask(ids, 2), warm.ask(prompt("qwen3", 80, 80, seed=9), 2)
    assert last.usage is not None and last.usage.idle_tokens == warm.scheduler.idle_tokens
    assert other.usage is not None and other.usage.idle_tokens == 0
