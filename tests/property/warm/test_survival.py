"""Random lives of a worker with hardly any memory and a disk: whatever befalls it, warm is cold.

Conversations go on over restarts, kills, clears, cancellations and lost files, several at once,
some of them apart from the cache, while kept KV and slots are short of room.
"""

import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, strategies as st

from hearth.shared.wire_messages import Failed, Finished, Up
from hearth.worker.schedule.memory_guard import MemoryGuard
from scripts.harness.slow_properties import slow
from scripts.harness.socketless_worker import Answer, Machine, machine
from scripts.harness.warm.warm_talks import AUTUMN_NAMES, KINDS, TOKENS_MAX, Talk
from tests.helpers.worker.disk_workers import Workers

EVENTS = ["ask"] * 6 + ["terminate", "kill", "clear", "cancel", "apart", "idle", "lose", "forget"]
LIVES = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 10**6)), min_size=6, max_size=14)
STEPS_MAX = 5_000  # more than any of these lives takes


class Life:
    """One worker after another, driven by chance, and a cold one that it is held to."""

    def __init__(self, directory: Path, name: str, is_exact: bool, seed: int) -> None:
        self._chance = random.Random(seed)
        self._directory = directory
        self._workers = Workers(directory)
        self._is_exact = is_exact
        self._name = name
        self._rules = {
            "is_exact": is_exact,
            "slots_max": self._chance.choice([1, 1, 2, 3]),
            "budget_mb": self._chance.choice([0, 0.4, 1.5, 512]),
        }
        self._kv_bytes = self._chance.choice([1, 2, 1000]) * self._slot_bytes(1_000)
        cold = machine(name, keeps=False, is_exact=is_exact)
        self._ends: Counter[str] = Counter()
        self._talk = Talk(name, self._start(), cold)
        self._talk.prompts = [self._talk.opening(self._chance) for _ in range(2)]

    def close(self) -> None:
        self._workers.kill()

    @property
    def warm(self) -> Machine:
        return self._talk.warm

    def _slot_bytes(self, tokens: int) -> int:
        size: int = machine(self._name).layers.slot_bytes(tokens, None)
        return size

    def _start(self) -> Machine:
        self._ends.clear()
        guard = MemoryGuard(lambda: self._kv_bytes, self._held)
        return self._workers.start(self._name, memory=guard, **self._rules)

    def _held(self) -> int:
        keeper = self._talk.warm.keeper
        return int(keeper.store.budget.bytes_used + sum(map(keeper.slot_bytes, keeper.slots)))

    # ------------------------------------------------------------ what befalls it

    def befall(self, what: str, seed: int) -> None:
        self._chance = random.Random(seed)
        getattr(self, what)()
        self.warm.check()
        budget = self.warm.keeper.store.budget
        assert budget.bytes_used <= budget.bytes_max
        assert len(self.warm.keeper.slots) <= self.warm.keeper.rules.slots_max
        counts = self._workers.file_store.report()["counts"]
        assert not [name for name in counts if name.startswith("damaged_")], counts

    def ask(self) -> None:
        """Have up to three prompts answered at once; some conversations go on then."""
        prompts = self._some(self._chance.randrange(1, 4))
        answers = [(self.warm.submit(ids, TOKENS_MAX), ids) for ids in prompts]
        self._run()
        for answer, ids in answers:
            if self._is_answered(answer, ids) and self._chance.random() < 0.7:
                self._goes_on(answer, ids)

    def apart(self) -> None:
        (ids,) = self._some(1)
        beside = self.warm.submit(self._some(1)[0], TOKENS_MAX)
        answer = self.warm.submit(ids, TOKENS_MAX, uses_cache=False)
        self._run()
        self._is_answered(beside, beside.request.ids)
        assert not self._is_answered(answer, ids) or answer.cached == 0

    def cancel(self) -> None:
        """A client leaves at any moment, and asks again."""
        (ids,) = self._some(1)
        answer = self.warm.submit(ids, TOKENS_MAX)
        self._run(self._chance.randrange(12))
        answer.request.lease.is_cancelled = True
        self._run()
        assert self._ends[answer.request.request_id] == 1
        again = self.warm.submit(ids, TOKENS_MAX)
        self._run()
        self._is_answered(again, ids)

    def clear(self) -> None:
        """The cache is emptied while prompts wait for the disk, are read, or are answered."""
        answers = [(self.warm.submit(ids, TOKENS_MAX), ids) for ids in self._some(2)]
        self._run(self._chance.randrange(12))
        self.warm.scheduler.forget()
        self._run()
        for answer, ids in answers:
            self._is_answered(answer, ids)

    def forget(self) -> None:
        """Nobody runs when the cache is emptied."""
        self.warm.scheduler.forget()
        assert self._held() == 0

    def idle(self) -> None:
        self.warm.work_ahead(self._chance.randrange(1, 6))

    def terminate(self) -> None:
        self.warm.keeper.queue_unwritten()
        self._workers.flush()
        self._talk.warm = self._start()

    def kill(self) -> None:
        """With or without an answer in progress, which is lost."""
        if self._chance.random() < 0.5:
            self.warm.submit(self._some(1)[0], TOKENS_MAX)
            self._run(self._chance.randrange(8))
        self._talk.warm = self._start()

    def lose(self) -> None:
        """Somebody removes files, any of them."""
        files = sorted(self._directory.rglob("*.safetensors"))
        for path in self._chance.sample(files, len(files) // 4):
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ one request after another

    def _some(self, count: int) -> list[list[int]]:
        talk, prompts = self._talk, []
        for _ in range(count):
            ids = self._chance.choice(talk.prompts)
            if self._chance.random() < 0.2:
                ids = talk.opening(self._chance)
            elif self._chance.random() < 0.2:
                ids = ids[:-20] + talk.words(self._chance, 30)
            prompts.append(ids)
        return prompts

    def _goes_on(self, answer: Answer, ids: list[int]) -> None:
        prompts = self._talk.prompts
        prompts.append(self._talk.turn(self._chance, ids, answer.tokens))
        del prompts[:-4]

    def _run(self, steps: int = STEPS_MAX) -> None:
        """Step until all is answered, or so often; the disk's answers come in between."""
        for _ in range(steps):
            if self.warm.scheduler.is_idle:
                return
            if self._chance.random() < 0.5:
                _deliver(self.warm)
            self._count(self.warm.step())
        assert steps < STEPS_MAX, "it goes round in circles"

    def _count(self, events: list[Up]) -> None:
        for event in events:
            if isinstance(event, Finished | Failed):
                self._ends[event.request_id] += 1

    def _is_answered(self, answer: Answer, ids: list[int]) -> bool:
        """Whether there was room for it: then what it says is what a cold worker says."""
        name = answer.request.request_id
        assert self._ends.pop(name, 0) == 1, name
        if answer.usage is None:
            assert self._kv_bytes < self._slot_bytes(len(ids) + 512), "there was room"
            return False
        self.warm.settled(answer)
        if answer.usage.completion_tokens < TOKENS_MAX:
            assert self.warm.scheduler.counts["memory_ends"], answer.reason
            return False
        self._talk.compare(answer, ids, self._is_exact)
        return True


def _deliver(warm: Machine) -> None:
    """Have what the disk has read come in now, though nobody waits for it."""
    while not warm.posted.empty():
        warm.scheduler.take_recalled(warm.posted.get_nowait())


@slow(3)
@given(
    st.one_of(
        st.tuples(st.sampled_from(KINDS), st.booleans()),
        st.tuples(st.sampled_from(AUTUMN_NAMES), st.just(True)),
    ),
    st.integers(0, 10**6),
    LIVES,
)
def test_whatever_befalls_a_worker_its_answers_are_those_of_a_cold_one(
    model: tuple[str, bool], seed: int, events: list[tuple[str, int]]
) -> None:
    name, is_exact = model
    with TemporaryDirectory() as directory:
        life = Life(Path(directory), name, is_exact, seed)
        try:
            for what, chance in events:
                life.befall(what, chance)
        finally:
            life.close()
