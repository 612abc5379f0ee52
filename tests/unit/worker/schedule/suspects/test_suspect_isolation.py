"""Suspects run alone, in small forwards, and clear themselves; with a scripted engine."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.suspects.forward_record import ForwardRecord, ForwardRow, read_record
from hearth.shared.suspects.suspect_store import SuspectStore, Suspicion
from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import prefix_hashes
from hearth.worker.schedule.request_state import Request
from hearth.worker.schedule.suspects.running_forwards import RunningForwards, answer_name, idle_name
from hearth.worker.schedule.suspects.suspect_isolation import PASSED_S, SuspectIsolation
from tests.helpers.worker.scripted_scheduler import (
    CHUNK,
    ROOT,
    ScriptedEngine,
    finish_of,
    request,
    run,
    scheduler,
    text_of,
)

LONG = [1] * 40


class Bench:
    """A scheduler with a store and a record; what the record names is noted at each forward."""

    def __init__(self, directory: Path, slots: int = 4, **scripts: list[int]) -> None:
        self.now = 0.0
        self.store = SuspectStore(directory / "suspects", lambda: self.now)
        self.path = directory / "worker-0.forward"
        record = ForwardRecord(self.path)
        parts = {
            "forwards": RunningForwards(record, self.store),
            "isolation": SuspectIsolation(self.store, CHUNK * 2, lambda: self.now),
        }
        copies = {name: [*script] for name, script in scripts.items()}
        self.scheduler, self.engine = scheduler(slots, parts=parts, **copies)
        self.named: list[tuple[str, list[ForwardRow]]] = []
        self._watch(self.engine)

    def _watch(self, engine: ScriptedEngine) -> None:
        prefill, step = engine.prefill, engine.decoder.step

        def watched_prefill(*arguments: Any) -> None:
            self.named.append(("prefill", read_record(self.path)))
            prefill(*arguments)

        def watched_step() -> Any:
            self.named.append(("decode", read_record(self.path)))
            return step()

        engine.prefill = watched_prefill  # type: ignore[method-assign]
        engine.decoder.step = watched_step  # type: ignore[method-assign]

    def suspect(self, made: Request, kind: str = "prefill", **fields: Any) -> Request:
        """Return the request, suspected of its prompt, or of its answer."""
        (whole,) = prefix_hashes(ROOT, made.query.tokens, [made.prompt_tokens])
        made.prompt_name = whole
        name, length = self.store.named(made.query.names[-1]), made.query.limit
        if kind == "decode":
            name, length = answer_name(self.store, whole), made.prompt_tokens
        row = Suspicion(name.hex(), "", "prefill", length, length, 1, 0, self.now, "SIGSEGV", False)
        row = dataclasses.replace(row, **{"kind": kind, **fields})  # type: ignore[arg-type]
        self.store.save(row)
        made.suspicions = (row,)
        return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield Bench(tmp_path, old=LONG, p=[1, 2], q=LONG, new=LONG)


def test_each_forward_names_whose_it_is_and_an_idle_worker_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, x=[1] * 5, y=[2] * 5)
    bench.scheduler.submit(request("x", prompt=25))
    bench.scheduler.submit(request("y", prompt=15))
    run(bench.scheduler)
    assert read_record(bench.path) == []
    for kind, rows in bench.named:
        assert rows and rows[0].kind == kind and not any(row.is_alone for row in rows)
    both = [[row.request_id for row in rows] for kind, rows in bench.named if kind == "decode"]
    assert ["x", "y"] in both
    (first,) = next(rows for kind, rows in bench.named if kind == "prefill")
    assert (first.length, first.name) == (CHUNK, bench.store.named(_name(request("x", prompt=25))))


def _name(made: Request) -> bytes:
    return made.query.names[0]


def test_a_prefill_names_those_too_that_the_device_decodes_ahead_for(bench: Bench) -> None:
    bench.scheduler.submit(request("old"))
    for _ in range(3):
        list(bench.scheduler.step())
    assert [row.request_id for row in read_record(bench.path)] == ["old"]
    bench.scheduler.submit(request("new", prompt=25))
    list(bench.scheduler.step())
    rows = [rows for kind, rows in bench.named if kind == "prefill"][-1]
    assert [(row.request_id, row.kind) for row in rows] == [("new", "prefill"), ("old", "decode")]


def test_the_record_tells_how_far_an_answer_is(bench: Bench) -> None:
    bench.scheduler.submit(request("old", prompt=5))
    for steps in range(1, 8):
        list(bench.scheduler.step())
        (row,) = bench.named[-1][1]
        assert (row.length, row.tokens) == (5, 5 + steps)


def test_a_suspect_waits_for_those_that_run_and_then_nobody_runs_beside_it(bench: Bench) -> None:
    bench.scheduler.submit(request("old"))
    list(bench.scheduler.step())
    bench.scheduler.submit(bench.suspect(request("p", prompt=45)))
    for _ in range(5):
        list(bench.scheduler.step())
    assert bench.scheduler.running == 1 and bench.scheduler.waiting == 1
    bench.now = awake_s() + PASSED_S + 1
    for number in range(60):
        bench.scheduler.submit(request(f"s{number}", prompt=3, tokens_max=3))
        list(bench.scheduler.step())
    begins = next(i for i, (_, rows) in enumerate(bench.named) if rows[0].request_id == "p")
    ends = next(i for i, (kind, _) in enumerate(bench.named[begins:]) if kind == "decode")
    alone = [rows for _, rows in bench.named[begins : begins + ends]]
    assert len(alone) == 9 and all([row.request_id for row in rows] == ["p"] for rows in alone)
    assert all(row.is_alone for rows in alone for row in rows)
    run(bench.scheduler)


def test_others_overtake_a_suspect_for_a_while_only(bench: Bench) -> None:
    bench.scheduler.submit(request("old"))
    list(bench.scheduler.step())
    suspect = bench.suspect(request("p", prompt=45))
    bench.scheduler.submit(suspect)
    bench.scheduler.submit(request("new"))
    list(bench.scheduler.step())
    assert bench.scheduler.running == 2
    bench.now = suspect.lease.received_at + PASSED_S + 1
    bench.scheduler.submit(request("q"))
    list(bench.scheduler.step())
    assert bench.scheduler.running == 2, "q waits behind the suspect"
    events = run(bench.scheduler)
    order = [e.request_id for e in events if type(e).__name__ == "Finished"]
    assert order.index("p") < order.index("q")


def test_a_suspect_is_read_in_a_quarter_of_the_chunk(bench: Bench) -> None:
    """The chunk is 20 here, and cuts are 10 apart."""
    bench.scheduler.submit(bench.suspect(request("p", prompt=25)))
    assert text_of(run(bench.scheduler), "p") == "ab"
    assert [entry for entry in bench.engine.decoder.log if "chunk" in entry] == [
        *["chunk 5"] * 4,
        "chunk 4",
    ]


def test_a_suspect_whose_tokens_are_kept_is_none(bench: Bench) -> None:
    made = bench.suspect(request("p", prompt=25), length=0)
    isolation = bench.scheduler._config.isolation
    assert isolation.gate([request("old")], [made])(made)


def chunks_of(bench: Bench) -> list[str]:
    return [entry for entry in bench.engine.decoder.log if "chunk" in entry]


def known(bench: Bench) -> tuple[Suspicion, ...]:
    return tuple(bench.store.all().values())


def test_served_in_small_forwards_a_suspect_is_tried_alone_in_whole_ones_and_then_cleared(
    bench: Bench,
) -> None:
    bench.scheduler.submit(bench.suspect(request("p", prompt=25)))
    assert finish_of(run(bench.scheduler), "p").reason == "stop"
    assert [row.stage for row in known(bench)] == ["trial"]
    trial, beside = request("q", prompt=25, text="p"), request("new")
    trial.suspicions = known(bench)
    bench.named.clear()
    bench.scheduler.submit(trial)
    bench.scheduler.submit(beside)
    for _ in range(2):
        list(bench.scheduler.step())
    assert all(row.is_alone and row.request_id == "q" for _, rows in bench.named for row in rows)
    twin = request("p2", prompt=25, text="p")
    twin.suspicions = trial.suspicions
    bench.scheduler.submit(twin)
    run(bench.scheduler)
    assert chunks_of(bench)[5:8] == ["chunk 10", "chunk 10", "chunk 4"]
    assert not known(bench), "for those too that were rendered before"


def test_one_that_died_at_its_trial_is_read_in_small_forwards_beside_others(bench: Bench) -> None:
    bench.scheduler.submit(request("old"))
    list(bench.scheduler.step())
    began = len(chunks_of(bench))
    bench.scheduler.submit(bench.suspect(request("p", prompt=25), stage="small"))
    list(bench.scheduler.step())
    assert bench.scheduler.running == 2
    run(bench.scheduler)
    assert chunks_of(bench)[began:] == [*["chunk 5"] * 4, "chunk 4"]
    assert [row.stage for row in known(bench)] == ["small"]


def test_who_leaves_is_not_served(bench: Bench) -> None:
    one = bench.suspect(request("p", prompt=45))
    bench.scheduler.submit(one)
    list(bench.scheduler.step())
    one.lease.is_cancelled = True
    assert finish_of(run(bench.scheduler), "p").reason == "cancelled"
    assert len(bench.store.all()) == 1


def test_a_suspect_of_its_answer_is_read_as_ever_and_left_alone_until_past_the_place(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, q=[1] * 200, new=LONG)
    bench.scheduler.submit(
        bench.suspect(request("q", prompt=25, tokens_max=300), "decode", tokens=30)
    )
    bench.scheduler.submit(request("new"))
    for _ in range(150):
        list(bench.scheduler.step())
        if "add new" in bench.engine.decoder.log:
            break
    assert bench.scheduler.running == 2
    (row,) = [r for r in read_record(bench.path) if r.request_id == "q"]
    assert 30 + 64 < row.tokens < 30 + 64 + 5
    assert bench.engine.decoder.log[:3] == ["chunk 10", "chunk 10", "chunk 4"]
    run(bench.scheduler)
    assert not bench.store.all()


def test_idle_work_that_ended_a_worker_is_not_done_again(bench: Bench) -> None:
    query = request("p", prompt=25).query
    isolation = bench.scheduler._config.isolation
    assert not isolation.spoils(query)
    name = idle_name(bench.store, query.names[1]).hex()
    bench.store.save(Suspicion(name, "", "idle", 20, 20, 1, 0, 0.0, "SIGABRT", False, "old"))
    assert not isolation.spoils(query), "of another version"
    row = bench.suspect(request("q")).suspicions[0]
    bench.store.save(dataclasses.replace(row, name=name, kind="idle"))
    assert isolation.spoils(query) and not isolation.spoils(request("other", prompt=25).query)
