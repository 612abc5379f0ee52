"""Checks that one key sees nothing of another's, and that no prompt text gets into the log."""

import io
import logging
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared import logging_setup as logs
from hearth.shared.wire_messages import Failed, Sampling, Speaker, Up
from hearth.worker.cache.block_hash import key_root, pack, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache_report import cache_report
from hearth.worker.constraint.token_mask import TokenMask
from hearth.worker.schedule.request_state import AnswerDeltas, ClientLease, Request
from hearth.worker.stream.output_processor import OutputProcessor
from scripts.harness.socketless_worker import ROOT, Answer, Machine, machine, vocabulary
from tests.helpers.proxy.proxy_app import app_of, ask
from tests.helpers.worker.session_prompts import QUESTION, SAID, Desk

MINE, THEIRS = Speaker("mine", "s1"), Speaker("theirs", "s1")
CANARY = "cAnArY-7731"


def asked_of_workers(
    edge: ProxyApp, path: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return what each worker is asked, for a request of `key`."""
    asked: list[Any] = []

    async def note(_: WorkerPool, what: str, about: str = "", api_key: str = "") -> dict[int, Any]:
        asked.append((what, about, api_key))
        return {}

    monkeypatch.setattr(WorkerPool, "ask", note)
    ask(edge, "GET", path, (b"x-api-key", key.encode()))
    return asked


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/sessions", ("sessions", "")),
        ("/v1/sessions/s1", ("session", "s1")),
        ("/v1/cache/prompts/r1", ("prompt", "r1")),
        ("/v1/cache", ("cache", "")),
    ],
)
def test_a_key_asks_for_its_own_sessions_prompts_and_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, what: tuple[str, str]
) -> None:
    several = app_of(tmp_path, PROXY_API_KEYS="mine, theirs", LOG_PROMPTS="true")
    for key in ("mine", "theirs"):
        digest = api_key_digest({"x-api-key": key})
        assert asked_of_workers(several, path, key, monkeypatch) == [(*what, digest)]
    single = app_of(tmp_path, PROXY_API_KEY="mine", LOG_PROMPTS="true")
    assert asked_of_workers(single, path, "mine", monkeypatch) == [(*what, "")]


@pytest.mark.parametrize("session", ["s1", ""])
def test_a_key_is_told_its_own_titles_only(session: str) -> None:
    desk = Desk()
    for key in ("mine", "theirs"):
        speaker = Speaker(key, session, client="pi", conversation="pi-1", title=f"words of {key}")
        desk.ask(QUESTION, SAID, speaker=speaker)
    reports, label = desk.sessions, session or "pi-1"
    for key, other in (("mine", "theirs"), ("theirs", "mine")):
        told = [
            reports.session_rows(key),
            reports.lines_report(label, key),
            reports.lines_report(label, key, True),
        ]
        for report in told:
            assert f"words of {key}" in str(report) and f"words of {other}" not in str(report)
    assert reports.lines_report(label, "no") is None


def logged(shows_text: bool) -> str:
    root = logging.getLogger()
    handlers, stream = root.handlers[:], io.StringIO()
    levels = {name: logging.getLogger(name).level for name in (None, *logs.OURS)}
    stderr, sys.stderr = sys.stderr, stream
    try:
        logs.configure("DEBUG", "test", shows_text)
        try:
            try:
                {}[CANARY]
            except KeyError as error:
                raise ValueError(f"{CANARY} again") from error
        except ValueError:
            logging.getLogger("hearth.worker").exception("it broke request=%s", "r1")
    finally:
        sys.stderr = stderr
        root.handlers[:] = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    return stream.getvalue()


def test_an_exception_that_quotes_a_prompt_is_logged_with_its_place_and_without_its_text() -> None:
    text = logged(shows_text=False)
    assert CANARY not in text
    assert "it broke request=r1" in text and "KeyError" in text and "ValueError" in text
    assert text.count("test_key_isolation.py") == 2, "both places are told"
    assert CANARY in logged(shows_text=True)


# ---------------------------------------------------------------- KV


def submitted(made: Machine, ids: list[int], key: str, guide: TokenMask | None = None) -> Answer:
    """Hand in a prompt of `key`."""
    root = key_root(ROOT, key)
    tokens, cuts = pack(ids), made.rule.cuts(ids)
    lease = ClientLease(uuid.uuid4().hex, b"peer")
    lease.lease_until = float("inf")
    request = Request(
        lease=lease,
        ids=list(ids),
        query=PrefixQuery(tokens, cuts, prefix_hashes(root, tokens, cuts), root=root),
        sampling=Sampling(),
        tokens_max=8,
        output=OutputProcessor(vocabulary("qwen3").detokeniser(), []),
        deltas=AnswerDeltas(lease.request_id),
        guide=guide,
    )
    return made.enter(request)


def entered(made: Machine, ids: list[int], key: str) -> Answer:
    """Compute a prompt of `key` to its end, alone."""
    answer = submitted(made, ids, key)
    made.run()
    return made.settled(answer)


def check_apart(made: Machine, *keys: str) -> None:
    """Assert that what is kept under each key's root is named by it, and that there is no other."""
    made.check()
    store = made.keeper.store
    found = 0
    for key in keys:
        root = store.root_of(key_root(ROOT, key))
        todo = [(extent, pack([])) for extent in root.leaving]
        while todo:
            extent, before = todo.pop()
            tokens = np.concatenate([before, extent.tokens])
            assert [extent.end.name] == prefix_hashes(root.name, tokens, [len(tokens)])
            todo += [(later, tokens) for later in extent.end.leaving]
            found += 1
    assert found == len(store)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("is_exact", [True, False])
def test_another_keys_kv_is_never_gone_on_from_so_that_no_prompt_can_be_guessed(
    name: str, is_exact: bool
) -> None:
    """Not from extents, not from a live slot, not from what decoding or idle time wrote."""
    words = np.random.default_rng(1).integers(3, 200, 300).tolist()
    warm = machine(name, tiny=True, slots_max=2, is_exact=is_exact)
    first = entered(warm, words, "mine")
    ahead = warm.keeper.idle_work.unfinished(lambda tokens: warm.rule.natural(tokens.tolist()))
    assert ahead is None or ahead.root == key_root(ROOT, "mine")
    warm.work_ahead()
    goes_on = [*words, *first.tokens[:-1], 7, 8, 9]
    for number, prompt in enumerate((words, goes_on, words[:200], words[:100])):
        guess = entered(warm, prompt, f"guess{number}")
        assert guess.cached == 0
        mine = entered(warm, prompt, "mine")
        assert mine.cached > 0
        if is_exact:
            assert guess.tokens == mine.tokens
        warm.work_ahead()
        check_apart(warm, "mine", *(f"guess{made}" for made in range(number + 1)))
    warm.keeper.clear()
    assert len(warm.keeper.store) == 0
    assert entered(warm, words, "mine").cached == 0


def test_another_keys_entries_that_made_way_are_not_in_the_report_of_the_cache() -> None:
    """Nor those that are kept: how long a neighbour's prompts are, and when they were sent."""
    warm = machine("qwen3", tiny=True, slots_max=2)
    for key, first in (("mine", 3), ("theirs", 203)):
        entered(warm, [*range(first, first + 150)], key)

    def told() -> list[dict[str, Any]]:
        return [cache_report(warm.keeper, 0, key) for key in ("", "mine", "theirs", "no")]

    for part in ("entries", "slots"):
        whole, mine, theirs, none = (report[part] for report in told())
        assert (len(mine), len(theirs), len(none)) == (1, 1, 0), part
        assert len(whole) == 2, part
    assert len({report["bytes"] for report in told()}) == 1
    for slot in warm.keeper.slots:
        warm.keeper.release_slot(slot)
    warm.keeper.release(warm.keeper.store.budget.bytes_used)
    whole, mine, theirs, none = (report["evicted"]["last"] for report in told())
    assert len(mine) == len(theirs) == 1 and none == []
    assert sorted(row["line"] for row in whole) == sorted(row["line"] for row in mine + theirs)


def test_a_key_keeps_its_root_when_the_cache_is_emptied_amid_its_answer() -> None:
    words = np.random.default_rng(2).integers(3, 200, 300).tolist()
    warm = machine("qwen3", tiny=True)
    answer = submitted(warm, words, "mine")
    warm.run(until=lambda: len(answer.logits) > 2)
    warm.keeper.clear()
    warm.run()
    check_apart(warm, "mine")
    assert entered(warm, words, "theirs").cached == 0
    assert entered(warm, words, "mine").cached > 0
    check_apart(warm, "mine", "theirs")


def test_an_answer_that_breaks_its_constraint_is_not_quoted_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = machine("qwen3", tiny=True)
    guide = TokenMask(1)
    guide.failure = f'Parser Error: token "{CANARY}"'
    submitted(made, [5, 6, 7], "mine", guide)
    told: list[Up] = []
    while not made.scheduler.is_idle:
        told += made.step()
    (failed,) = (row for row in told if isinstance(row, Failed))
    assert CANARY in failed.text, "its own client is told"
    assert "constraint broke" in caplog.text and CANARY not in caplog.text
