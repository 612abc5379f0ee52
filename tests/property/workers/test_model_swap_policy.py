"""Models change hands under any load: everyone is served, nobody is cut, nothing thrashes."""

from dataclasses import dataclass, field, replace

from hypothesis import given, strategies as st

from hearth.proxy.workers.model_swap import (
    KEEP_S,
    TURN_S,
    UNLOADED,
    ModelRequest,
    WorkerModel,
    wanted_models,
)

TICK_S = 1.0
LOAD_S = 5.0
MODELS = ("a", "b", "c")


@dataclass
class Seat:
    """A worker of the simulation."""

    place: WorkerModel
    ready_at: float = 0.0
    closed_at: float | None = None
    ends: list[float] = field(default_factory=list)  # of what it runs


@dataclass(frozen=True)
class Asked:
    at: float
    model: str
    for_s: float  # that it runs


class World:
    """Workers that load for LOAD_S, and requests that run for as long as they say."""

    def __init__(self, count: int, unload_s: float) -> None:
        places = [
            WorkerModel(i, "a", is_ready=True, used_at=-99, ready_at=-99) for i in range(count)
        ]
        self.seats = [Seat(place) for place in places]
        self.unload_s = unload_s
        self.waiting: list[Asked] = []
        self.served: list[tuple[Asked, float]] = []
        self.moves = 0

    def tick(self, now: float, arriving: list[Asked]) -> None:
        for seat in self.seats:
            self._go_on(seat, now)
        self.waiting += arriving
        self._serve(now)
        wants = [ModelRequest(asked.model, asked.at) for asked in self.waiting]
        given = wanted_models([seat.place for seat in self.seats], wants, now, self.unload_s)
        for seat in self.seats:
            self._apply(seat, given.get(seat.place.worker_id), now)
        self._serve(now)

    def _go_on(self, seat: Seat, now: float) -> None:
        if any(end <= now for end in seat.ends):
            seat.ends = [end for end in seat.ends if end > now]
            seat.place = replace(seat.place, load=len(seat.ends), used_at=now)
        if not seat.place.is_ready and not seat.place.is_empty and now >= seat.ready_at:
            seat.place = replace(seat.place, is_ready=True, ready_at=now, used_at=now)

    def _apply(self, seat: Seat, goal: str | None, now: float) -> None:
        place = seat.place
        if goal is None:
            seat.closed_at = None
            return
        assert place.is_ready or place.is_empty, "what loads is let load"
        assert goal != place.model or place.is_empty
        if seat.closed_at is None:
            seat.closed_at = now
        if not place.load:
            assert place.is_empty or now - place.ready_at >= KEEP_S, "it thrashes"
            self.moves += 1
            seat.ready_at, seat.closed_at = now + LOAD_S, None
            model = place.model if goal == UNLOADED else goal
            seat.place = WorkerModel(place.worker_id, model, is_empty=goal == UNLOADED)

    def _serve(self, now: float) -> None:
        for asked in list(self.waiting):
            for seat in self.seats:
                is_open = seat.closed_at is None or asked.at < seat.closed_at
                if seat.place.is_ready and seat.place.model == asked.model and is_open:
                    seat.ends.append(now + asked.for_s)
                    seat.place = replace(seat.place, load=len(seat.ends), used_at=now)
                    self.served.append((asked, now - asked.at))
                    self.waiting.remove(asked)
                    break


requests = st.builds(
    Asked,
    at=st.integers(0, 120).map(float),
    model=st.sampled_from(MODELS),
    for_s=st.integers(1, 60).map(float),
)


@given(st.lists(requests, max_size=40), st.integers(1, 3), st.sampled_from([0.0, 3.0, 20.0]))
def test_every_request_is_served_in_bounded_time(
    asked: list[Asked], count: int, unload_s: float
) -> None:
    world = World(count, unload_s)
    arriving = sorted(asked, key=lambda each: each.at)
    # Each other model has its turn, drains what it runs, and is loaded over.
    wait_s_max = len(MODELS) * (TURN_S + 60 + LOAD_S + KEEP_S + 3 * TICK_S)
    now = 0.0
    while arriving or world.waiting:
        assert now <= 120 + wait_s_max, world.waiting
        come = [each for each in arriving if each.at <= now]
        arriving = arriving[len(come) :]
        world.tick(now, come)
        now += TICK_S
    assert len(world.served) == len(asked)
    assert all(wait_s <= wait_s_max for _, wait_s in world.served)


@given(st.integers(1, 3), st.integers(2, 40))
def test_models_that_take_turns_on_workers_enough_are_loaded_once(
    count: int, questions: int
) -> None:
    world = World(count, 0.0)
    for number in range(questions):
        now = number * 10.0
        for second in range(10):
            model = MODELS[number % count]
            asked = [Asked(now, model, 2.0)] if second == 0 else []
            world.tick(now + second, asked)
    assert world.moves <= count - 1
    assert not world.waiting
