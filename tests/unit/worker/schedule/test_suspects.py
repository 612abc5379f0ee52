"""Prompts that end their workers: what they are known by, whose they are, and how they run again.

That a worker names what it computes before it does is held end to end (e2e/faults/test_poison.py).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.suspects import SuspectStore, running_path, take_running
from hearth.worker.cache.block_hash import PrefixHash, key_root, prefix_hashes
from hearth.worker.schedule.request_state import BEHIND_TOKENS, Request, Suspicion
from hearth.worker.schedule.suspects import Suspects
from tests.helpers.worker.scripted_scheduler import ROOT, request, run, scheduler


class Workers:
    """One worker after another with one store of suspects."""

    def __init__(self, directory: Path) -> None:
        self.store = SuspectStore(directory / "suspects")
        self.socket_path = directory / "worker-0.sock"
        self.start()

    def start(self) -> None:
        self.suspects = Suspects(self.store, self.socket_path)

    def come(self, made: Request, root: PrefixHash = ROOT) -> bool:
        """Let a request come; say whether it was not refused."""
        query = made.query
        (prompt_name,) = prefix_hashes(root, query.tokens, [len(query.tokens)])
        names = prefix_hashes(root, query.tokens, query.cuts)
        made.query = replace(query, names=names)
        try:
            suspects = self.suspects.find(root, query.tokens)
        except RequestError as error:
            assert error.code == "prompt_refused"
            return False
        made.suspicion = Suspicion(prompt_name, suspects)
        return True

    def die(self, made: Request, *beside: Request, at: int) -> None:
        """Let a worker end by a request that is so far: behind its prompt it is answered."""
        made.position = min(at, made.query.limit)
        made.sampled = [1] * (at - made.position)
        self.suspects.record([made, *beside])
        self.store.record_death(take_running(self.socket_path), "SIGSEGV")
        self.start()


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path)


@pytest.mark.parametrize("at", [15, 60])
def test_who_ends_two_workers_is_refused_and_who_ran_beside_it_is_not(
    workers: Workers, at: int
) -> None:
    innocent = request("innocent", prompt=35)
    for _ in range(2):
        made = request("p", prompt=35)
        assert workers.come(made) and workers.come(innocent)
        workers.die(made, *[innocent] * (not made.suspicion.suspects), at=at)
    assert not workers.come(request("p", prompt=35))
    assert workers.come(innocent) and innocent.suspicion.suspects
    assert workers.suspects.report()["refusals"] == 1


def test_a_refusal_is_of_every_prompt_that_begins_so_far_alike_and_of_no_other(
    workers: Workers,
) -> None:
    """The first death is amid the first cut, the second behind it: only that is refused."""
    for at in (5, 15):
        made = request("p", prompt=35)
        assert workers.come(made)
        workers.die(made, at=at)
    assert not workers.come(request("longer", prompt=60, text="p"))
    assert workers.come(request("shorter", prompt=19, text="p"))
    other = request("other", prompt=60, text="p")
    other.query.tokens[16] += 1
    assert workers.come(other)


def test_an_answer_is_refused_for_the_same_prompt_alone(workers: Workers) -> None:
    """The agent's next turn reads other tokens there."""
    for _ in range(2):
        made = request("writes", prompt=35)
        assert workers.come(made)
        workers.die(made, at=60)
    assert not workers.come(request("writes", prompt=35))
    assert workers.come(request("next", prompt=60, text="writes"))


def test_another_keys_same_prompt_is_none(workers: Workers) -> None:
    """Else a refusal would tell B what A has sent."""
    for _ in range(2):
        made = request("p", prompt=35)
        assert workers.come(made, key_root(ROOT, "A"))
        workers.die(made, at=15)
    again = request("p", prompt=35)
    assert not workers.come(again, key_root(ROOT, "A"))
    assert workers.come(again, key_root(ROOT, "B"))
    assert workers.come(again, PrefixHash(b"of another model, or MLX"))
    workers.suspects = Suspects(workers.store, cut_label="PREFILL_CHUNK=256")
    assert workers.come(again, key_root(ROOT, "A")), "other forwards are tried again"


def test_a_suspect_runs_alone_until_it_is_past_the_place(workers: Workers) -> None:
    made = request("one", prompt=35)
    workers.come(made)
    workers.die(made, at=54)
    (row,) = workers.store.all().values()
    assert (row.kind, row.length) == ("answer", 35)
    scripts = {"old": [1] * 40, "one": [1] * 300, "new": [1] * 40}
    worker, engine = scheduler(parts={"suspects": workers.suspects}, **scripts)
    named: list[dict[str, Any]] = []  # at each forward

    def noting(call: Any) -> Any:
        def noted(*given: Any) -> Any:
            told = running_path(workers.socket_path).read_bytes().partition(b"\n")[0]
            named.append(orjson.loads(told))
            return call(*given)

        return noted

    decoder: Any = engine.decoder
    decoder.step = noting(decoder.step)
    engine.prefill = noting(engine.prefill)  # type: ignore[method-assign]
    worker.submit(request("old", prompt=25))
    list(worker.step())
    one = request("one", prompt=35, tokens_max=300)
    workers.come(one)
    worker.submit(one)
    worker.submit(request("new", prompt=25))
    run(worker)
    order = [[*rows] for rows in named]
    begins, joined = order.index(["one"]), order.index(["new", "one"])
    assert ["old"] in order[:begins] and all(rows == ["one"] for rows in order[begins:joined])
    assert BEHIND_TOKENS <= joined - begins <= BEHIND_TOKENS + 60
    for rows in named[begins:]:
        assert "one" not in rows or rows["one"]["is_alone"] == (len(rows) == 1)
    assert not workers.store.all(), "served"
    workers.store.record_death(take_running(workers.socket_path), "SIGSEGV")
    assert not workers.store.all(), "an idle worker names nobody"


def test_one_that_is_served_is_cleared_and_one_that_leaves_is_not(workers: Workers) -> None:
    died = [request("one", prompt=45), request("two", prompt=45)]
    assert all(map(workers.come, died))
    workers.die(*died, at=15)
    assert len(workers.store.all()) == 2
    for name, left in (("one", 2), ("two", 1)):
        worker, _ = scheduler(parts={"suspects": workers.suspects})
        made = request(name, prompt=45)
        workers.come(made)
        worker.submit(made)
        list(worker.step())
        made.lease.is_cancelled = name == "one"
        run(worker)
        assert len(workers.store.all()) == left


def test_idle_work_that_ended_a_worker_is_not_done_again_and_refuses_nobody(
    workers: Workers,
) -> None:
    made = request("p", prompt=25)
    assert not workers.suspects.forbids_idle_prefill(made.query)
    for _ in range(3):
        workers.suspects.record_idle(made.query, 1)
        workers.store.record_death(take_running(workers.socket_path), "SIGSEGV")
    assert workers.suspects.forbids_idle_prefill(made.query)
    assert not workers.suspects.forbids_idle_prefill(request("other", prompt=25).query)
    assert workers.come(made)
    workers.suspects.drop_answered(made)
    assert workers.suspects.forbids_idle_prefill(made.query), "also when a request was served"


def test_each_key_is_told_its_own_and_clears_its_own(workers: Workers, tmp_path: Path) -> None:
    died = [request(key, prompt=25) for key in "AB"]
    for made in died:
        made.api_key = made.request_id
        workers.come(made)
    workers.die(*died, at=15)
    suspects = workers.suspects
    files = (tmp_path / "suspects").glob("*.suspect")
    assert b'"A"' not in b"".join(path.read_bytes() for path in files)
    report = suspects.report("A")
    assert (report["suspects"], report["refused"]) == (2, 0), "sums are over all keys"
    assert (len(suspects.report()["rows"]), len(report["rows"])) == (2, 1)
    suspects.clear("B")
    assert len(suspects.report()["rows"]) == 1 == len(suspects.report("A")["rows"])
    suspects.clear()
    assert suspects.report()["rows"] == []


def test_what_runs_is_written_to_a_private_file_of_this_workers_own(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    path = running_path(tmp_path / "worker-0.sock")
    path.symlink_to(other)
    before = os.umask(0)
    try:
        suspects = Workers(tmp_path).suspects
    finally:
        os.umask(before)
    suspects.record([request("x", prompt=25)])
    assert other.read_text() == "mine" and not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
