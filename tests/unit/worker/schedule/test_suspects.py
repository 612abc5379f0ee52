"""Prompts that end their workers end two at most, and others are served: with a scripted engine."""

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.suspects import Suspect, SuspectStore, running_path, take_running
from hearth.shared.wire_messages import Finished
from hearth.worker.cache.block_hash import PrefixHash, key_root, pack, prefix_hashes
from hearth.worker.schedule.request_state import BEHIND_TOKENS, Request
from hearth.worker.schedule.suspects import Suspects
from tests.helpers.worker.scripted_scheduler import (
    ROOT,
    request,
    scheduler,
)

LONG = [1] * 40
POISON = 99_999  # a token: who reads it ends the worker


class Died(Exception):
    pass


class Machine:
    """A worker that dies where a prompt's or an answer's poison is computed, and starts again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = SuspectStore(directory / "suspects")
        self.socket_path = directory / "worker-0.sock"
        self.deaths = 0
        self.told: Counter[str] = Counter()  # "p 503", "p served", "p 400"
        self.named: list[dict[str, Suspect]] = []  # at each forward
        self.start()

    def start(self) -> None:
        self.suspects = Suspects(self.store, self.socket_path)
        self.worker, engine = scheduler(parts={"suspects": self.suspects})
        self.scripts = engine.decoder.scripts = Scripts()
        prefill, step = engine.prefill, engine.decoder.step

        def prefill_or_die(cache: Any, ids: list[int], *more: Any) -> None:
            self.note()
            if POISON in ids:
                raise Died
            prefill(cache, ids, *more)

        def step_or_die() -> Any:
            self.note()
            for key in engine.decoder.sequences:
                if key.startswith("writes") and len(self.scripts.get(key, LONG)) < 30:
                    raise Died
            return step()

        engine.prefill = prefill_or_die  # type: ignore[method-assign]
        engine.decoder.step = step_or_die  # type: ignore[method-assign]

    def note(self) -> None:
        told = running_path(self.socket_path).read_bytes().partition(b"\n")[0]
        self.named.append({key: Suspect(**row) for key, row in orjson.loads(told).items()})

    def send(self, made: Request, root: PrefixHash = ROOT) -> bool:
        """Submit a request; say whether it was not refused."""
        tokens = made.query.tokens
        (made.prompt_name,) = prefix_hashes(root, tokens, [len(tokens)])
        try:
            made.suspects = self.suspects.among(root, tokens)
            self.worker.submit(made)
        except RequestError as error:
            assert error.code == "prompt_refused"
            self.told[f"{made.request_id} 400"] += 1
            return False
        except Died:
            self.die()
        return True

    def step(self) -> None:
        """Do a step of a worker; have it followed by another where it died of it."""
        try:
            for event in self.worker.step():
                self.told[f"{event.request_id} served"] += isinstance(event, Finished)
        except Died:
            self.die()

    def die(self, how: str = "SIGSEGV") -> None:
        self.deaths += 1
        rows = self.store.note_death(take_running(self.socket_path), how)
        for request_id, row in rows.items():
            self.told[f"{request_id} {row.error().status}"] += 1
        self.start()

    def run(self, *requests: Request) -> None:
        """Send these, one behind the other, and compute until all is answered."""
        for each in requests:
            self.send(each)
        for _ in range(1000):
            if self.worker.is_idle:
                return
            self.step()
        raise AssertionError("it does not come to an end")


class Scripts(dict[str, list[int]]):
    """Every answer is a LONG one."""

    def setdefault(self, key: str, default: Any = None) -> list[int]:
        return super().setdefault(key, [*LONG])


def poison(name: str = "p", prompt: int = 35, at: int = 15) -> Request:
    """Return a request whose token `at` ends its worker."""
    made = request(name, prompt=prompt)
    made.ids[at] = POISON
    tokens = pack(made.ids)
    names = prefix_hashes(ROOT, tokens, made.query.cuts)
    made.query = dataclasses.replace(made.query, tokens=tokens, names=names)
    return made


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("name", ["p", "writes"])
def test_a_poison_prompt_sent_10_times_beside_innocents_ends_two_workers(
    machine: Machine, name: str
) -> None:
    """Each time innocents run and come, of which none is refused."""
    for number in range(10):
        machine.send(request(f"before{number}", prompt=25, text="before"))
        machine.step()
        made = request(name, prompt=35) if name == "writes" else poison(name)
        machine.send(made)
        machine.run(request(f"beside{number}", prompt=25, text="beside"))
        machine.run(request("innocent", prompt=25, text="before"))
    assert machine.deaths == 2
    assert machine.told[f"{name} 400"] == 9 and machine.told[f"{name} 503"] == 1
    assert machine.told["innocent served"] == 10
    assert {key for key in machine.told if key.endswith("400")} == {f"{name} 400"}


def test_a_refusal_is_of_every_longer_prompt_and_of_no_other(machine: Machine) -> None:
    for _ in range(2):
        machine.run(poison())
    assert not machine.send(poison("p", prompt=60)), "its beginning is the same up to the cut"
    other = poison("p", prompt=60)
    other.query.tokens[16] += 1
    assert machine.send(other)


def test_an_answer_is_refused_for_the_same_prompt_alone(machine: Machine) -> None:
    """The agent's next turn reads other tokens there; served, it clears nothing of that."""
    machine.run(request("writes", prompt=35))
    machine.run(request("next", prompt=60, text="writes"))
    machine.run(request("writes", prompt=35))
    assert machine.deaths == 2 and not machine.send(request("writes", prompt=35))
    assert machine.send(request("next", prompt=60, text="writes"))
    assert machine.told["next served"] == 1


def test_a_shared_beginning_is_not_refused_for_what_came_behind_it(machine: Machine) -> None:
    """A suspect of its beginning that dies behind it alone: no other prompt begins with that."""
    machine.send(poison(at=25))
    machine.step()
    machine.die(how="SIGKILL")  # at the first cut; the second death is amid the third
    machine.run(poison(at=25))
    assert not machine.send(poison(at=25))
    assert machine.send(request("other", prompt=20, text="p"))


def test_another_keys_same_prompt_is_none(machine: Machine) -> None:
    """Else a refusal would tell B what A has sent."""
    for _ in range(2):
        made = poison()
        query = made.query
        names = prefix_hashes(key_root(ROOT, "A"), query.tokens, query.cuts)
        made.query = dataclasses.replace(query, names=names)
        machine.send(made, root=key_root(ROOT, "A"))
        machine.run()
    assert not machine.send(poison(), root=key_root(ROOT, "A"))
    assert machine.send(poison(), root=key_root(ROOT, "B"))
    assert machine.send(poison(), root=PrefixHash(b"of another model, or MLX"))


def test_a_suspect_runs_alone_until_it_is_past_the_place(machine: Machine) -> None:
    machine.send(request("one", prompt=35))
    for _ in range(20):
        machine.step()
    machine.die()
    (row,) = machine.store.all().values()
    assert (row.kind, row.length) == ("answer", 35)
    machine.named.clear()
    machine.send(request("old", prompt=25))
    machine.step()
    one = request("one", prompt=35, tokens_max=300)
    machine.scripts["one"] = [1] * 300
    machine.send(one)
    machine.run(request("new", prompt=25))
    order = [[*rows] for rows in machine.named]
    begins = order.index(["one"])
    joined = order.index(["new", "one"])
    assert ["old"] in order[:begins] and all(rows == ["one"] for rows in order[begins:joined])
    assert BEHIND_TOKENS <= joined - begins <= BEHIND_TOKENS + 60
    for rows in machine.named[begins:]:
        assert "one" not in rows or rows["one"].is_alone == (len(rows) == 1)
    assert machine.told["one served"] == 1 and not machine.store.all()


def test_one_that_is_served_is_cleared_and_one_that_leaves_is_not(machine: Machine) -> None:
    machine.send(request("one", prompt=45))
    machine.send(request("two", prompt=45))
    machine.step()
    machine.step()
    machine.die()
    assert len(machine.store.all()) == 2
    left = request("one", prompt=45)
    machine.send(left)
    machine.step()
    left.lease.is_cancelled = True
    machine.run()
    assert len(machine.store.all()) == 2
    machine.run(request("two", prompt=45))
    assert len(machine.store.all()) == 1


def test_idle_work_that_ended_a_worker_is_not_done_again_and_refuses_nobody(
    machine: Machine,
) -> None:
    query = request("p", prompt=25).query
    assert not machine.suspects.spoils(query)
    for _ in range(3):
        machine.suspects.note_idle(query, 1)
        machine.die()
    assert machine.suspects.spoils(query)
    assert not machine.suspects.spoils(request("other", prompt=25).query)
    machine.run(request("p", prompt=25))
    assert machine.told["p served"] == 1
    assert machine.suspects.spoils(query), "also when a request was served"


def test_each_key_is_told_its_own_and_clears_its_own(machine: Machine) -> None:
    for key in "AB":
        made = request(key, prompt=25)
        made.key = key
        machine.send(made)
    machine.step()
    machine.step()
    machine.die()
    suspects = machine.suspects
    files = (machine.directory / "suspects").glob("*.suspect")
    assert b'"A"' not in b"".join(path.read_bytes() for path in files)
    assert len(suspects.report()["rows"]) == 2
    report = suspects.report("A")
    assert (report["suspects"], report["refused"]) == (2, 0), "sums are over all keys"
    assert len(report["rows"]) == 1
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
        suspects = Suspects(SuspectStore(tmp_path / "suspects"), tmp_path / "worker-0.sock")
    finally:
        os.umask(before)
    suspects.note([request("x", prompt=25)])
    assert other.read_text() == "mine" and not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
