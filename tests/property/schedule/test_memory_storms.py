"""Random storms: the process takes 15 % more than MLX counts, and the system says what it likes.

Whatever comes, each request has one end, what is kept goes before anybody is refused, and a prompt
is refused only where nothing that may go would have made room.
"""

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.wire_messages import Failed, Finished
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.system_state import MemoryUse, Pressure
from hearth.worker.kv.memory_release import Reason
from hearth.worker.schedule.memory_guard import WAIT_S_MAX, MemoryGuard, PressureRelief
from scripts.harness.slow_properties import slow
from scripts.harness.socketless_worker import Answer, Machine, machine
from tests.helpers.worker.watched_memory import held_bytes, ids, slot_bytes

MORE = 1.15  # what the process takes of what MLX counts
LIMIT_TOKENS = 1_500  # of a slot that would fill the limit
STEPS_MAX = 5_000
STEP_S = 0.5  # by the clock of the system's memory
EVENTS = ["ask"] * 4 + ["step"] * 3 + ["normal", "warning", "critical"]
STORMS = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, 10**6)), min_size=12, max_size=20
)


class ShedKV:
    """What a worker keeps, and how much of it was really given back under pressure."""

    def __init__(self, keeper: Callable[[], Any]) -> None:
        self._keeper = keeper
        self.freed_bytes = 0

    @property
    def kept_bytes(self) -> int:
        keeper = self._keeper()
        return int(keeper.store.budget.bytes_used - keeper.pins.nbytes)

    def releasable(self, spared: PrefixQuery | None = None) -> int:
        return int(self._keeper().releasable(spared))

    def release(self, nbytes: int, spared: PrefixQuery | None, reason: Reason) -> None:
        before = self._there()
        self._keeper().release(nbytes, spared, reason)
        self.freed_bytes += before - self._there()

    def _there(self) -> int:
        keeper = self._keeper()
        return int(keeper.store.budget.bytes_used + sum(map(keeper.slot_bytes, keeper.slots)))


class StormyWorker:
    """A worker whose process takes more than its arrays, later than they go."""

    def __init__(self, name: str, lag: int, seed: int) -> None:
        self.level = Pressure.NORMAL
        self.limit = slot_bytes(LIMIT_TOKENS, name)
        self.ends: Counter[str] = Counter()
        self.codes: Counter[str] = Counter()
        self.asked: list[Answer] = []
        self.wrong: list[str] = []  # what should not have happened
        self._waited_s = 0.0  # by the clock that the relief reads, beside real time
        self._critical_from: float | None = None
        self._asked_at: dict[str, float] = {}
        self._seen = deque([0], maxlen=lag + 1)
        self._chance = random.Random(seed)
        self.use = MemoryUse(self._process, self._held, lambda: 0)
        self.shed = ShedKV(lambda: self.machine.keeper)
        self.relief = PressureRelief(
            self.shed, lambda: self.shed.kept_bytes, lambda: self.level, self._clock
        )
        self.machine: Machine = machine(
            name,
            tiny=True,
            memory=MemoryGuard(lambda: self.limit, self.use.bytes_used),
            relief=self.relief,
            slots_max=3,
        )

    def _clock(self) -> float:
        return time.monotonic() + self._waited_s

    def _held(self) -> int:
        return held_bytes(self.machine) if hasattr(self, "machine") else 0

    def _process(self) -> int:
        """What the system says: it notices a while later what has gone."""
        return max(self._seen)

    # ------------------------------------------------------------ what befalls it

    def befall(self, what: str, seed: int) -> None:
        self._chance = random.Random(seed)
        if what == "ask":
            self._ask()
        elif what == "step":
            self._steps(self._chance.randrange(1, 12))
        else:
            self._set_level(Pressure[what.upper()])

    def pass_time(self, seconds: float) -> None:
        self._waited_s += seconds

    def look(self) -> None:
        """A second passes, and the worker asks how short of memory the system is."""
        self.pass_time(1.0)
        self.relief.step()

    def calm(self) -> None:
        """The storm is over: all that waits is served."""
        self._set_level(Pressure.NORMAL)
        self._steps(STEPS_MAX)
        assert self.machine.scheduler.is_idle, "it goes round in circles"

    def _set_level(self, level: Pressure) -> None:
        if (level == Pressure.CRITICAL) != (self.level == Pressure.CRITICAL):
            self._critical_from = self._clock() if level == Pressure.CRITICAL else None
        self.level = level

    def _ask(self) -> None:
        """Ask something new, or go on from what was asked."""
        count = self._chance.randrange(20, 500)
        asked = ids(count, self._chance.randrange(4))
        if self.asked and self._chance.random() < 0.5:
            asked = self._chance.choice(self.asked).request.ids[:700] + asked[:100]
        self.asked.append(self.machine.submit(asked, self._chance.randrange(1, 20)))
        self._asked_at[self.asked[-1].request.request_id] = self._clock()

    def _steps(self, count: int) -> None:
        for _ in range(count):
            if self.machine.scheduler.is_idle:
                return
            self._waited_s += STEP_S
            self._seen.append(int(MORE * self._held()))
            self.use.measure()
            self.relief.step()
            begun = self._begun()
            for event in self.machine.step():
                if isinstance(event, Finished | Failed):
                    self.ends[event.request_id] += 1
                if isinstance(event, Failed):
                    self._judge(event)
            if self.relief.level == Pressure.CRITICAL and self._begun() != begun:
                self.wrong.append("a prompt began while the system was critically short")

    def _begun(self) -> set[str]:
        return {a.request.request_id for a in self.asked if a.request.times is not None}

    def _judge(self, failed: Failed) -> None:
        """Note a refusal that giving up more, or waiting, would have spared."""
        self.codes[failed.code] += 1
        if failed.code == "memory_pressure":
            since = max(self._asked_at[failed.request_id], self._critical_from or self._clock())
            if self._clock() - since < WAIT_S_MAX:
                self.wrong.append(f"refused after {self._clock() - since:.0f} s: {failed.text}")
            return
        request = self.machine.answers[failed.request_id].request
        keeper = self.machine.keeper
        rows = request.prompt_tokens + request.tokens_max
        needed = keeper.uncached.slot_cost(request.query, rows)
        busy = sum(keeper.slot_bytes(slot) for slot in keeper.slots if slot.is_busy)
        if MORE * (needed + busy) <= self.limit:
            self.wrong.append(failed.text)


def storm_over(name: str, lag: int, storm: list[tuple[str, int]], seed: int) -> StormyWorker:
    worker = StormyWorker(name, lag, seed)
    for what, chance in storm:
        worker.befall(what, chance)
    worker.calm()
    asked = [answer.request.request_id for answer in worker.asked]
    assert worker.ends == Counter(asked)
    worker.machine.check()
    return worker


@pytest.mark.parametrize(("name", "lag"), [("qwen3", 0), ("qwen3", 8), ("qwen3_5", 0)])
@slow(3)
@given(storm=STORMS, seed=st.integers(0, 10**6))
def test_a_storm_loses_no_request_sheds_before_it_refuses_and_all_is_told(
    name: str, lag: int, storm: list[tuple[str, int]], seed: int
) -> None:
    """Also where the process shrinks later than what it holds."""
    worker = storm_over(name, lag, storm, seed)
    assert not worker.wrong
    report = worker.machine.scheduler.report()
    assert report["ends"].get("memory_refusals", 0) == worker.codes["context_length_exceeded"]
    assert report["ends"].get("pressure_refusals", 0) == worker.codes["memory_pressure"]
    assert report["pressure"]["level"] == worker.relief.level.name.lower()
    assert worker.relief.shed_bytes <= worker.shed.freed_bytes


def test_a_prompt_that_queued_for_long_has_not_waited_for_the_systems_memory() -> None:
    worker = StormyWorker("qwen3", 0, 1)
    worker.befall("ask", 1)
    worker.pass_time(2 * WAIT_S_MAX)
    worker.befall("critical", 0)
    worker.befall("step", 3)
    assert not worker.codes
    worker.calm()
    assert worker.ends == {"r1": 1} and not worker.codes


def prefilled_ahead(level: str) -> int:
    """Return how many tokens are prefilled in idle time at this level of the system's."""
    worker = StormyWorker("qwen3", 0, 1)
    worker.befall("ask", 1)
    worker.calm()
    worker.befall(level, 0)
    worker.look()
    asked = worker.asked[0].request
    worker.machine.scheduler.forget()
    worker.machine.scheduler.prefill_later(asked.query)
    worker.machine.work_ahead(5)
    return worker.machine.scheduler.idle_tokens


def test_a_prompt_that_may_come_is_prefilled_in_idle_time() -> None:
    assert prefilled_ahead("normal") > 0


@pytest.mark.parametrize("level", ["warning", "critical"])
def test_nothing_is_prefilled_ahead_while_the_system_is_short_of_memory(level: str) -> None:
    assert prefilled_ahead(level) == 0
