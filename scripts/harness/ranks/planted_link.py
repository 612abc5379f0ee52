"""Spoils one operation on its way to the other ranks, to see that it is found."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from hearth.worker.ranks.rank_link import LeaderLink, OnEvent, RankRoom, Value

Plant = Literal["none", "order", "dropped", "changed", "noise"]
SPOILED: Final = ("prefill", "step", "copy_rows", "put_rows", "trim", "add")


class PlantedLink:
    """Tells what it is told to tell, but for one operation. Owner: the inference thread.

    `order` tells it after the next one, `dropped` never, `changed` with other arguments. `noise` is
    no fault of the link: a follower adds it.
    """

    def __init__(self, link: LeaderLink, plant: Plant, after: int) -> None:
        """The first fit operation behind `after` others is spoiled."""
        self._link = link
        self._plant = plant
        self._left = after
        self._held: Callable[[], None] | None = None
        self.planted_at = 0.0
        self.size = link.size
        self.hosts: Sequence[str] = link.hosts

    @property
    def rooms(self) -> Mapping[int, RankRoom]:
        return self._link.rooms

    @property
    def on_event(self) -> OnEvent:
        return self._link.on_event

    @on_event.setter
    def on_event(self, value: OnEvent) -> None:
        self._link.on_event = value

    def tell(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> None:
        def send(*changed: Value) -> None:
            self._link.tell(name, *(changed or arguments), drops=drops)

        if self._is_due(name):
            self._spoil(send, arguments)
            return
        send()
        if self._held is not None:
            held, self._held = self._held, None
            held()

    def _is_due(self, name: str) -> bool:
        self._left -= 1
        fits = name == "prefill" if self._plant == "changed" else name in SPOILED
        is_planted = self._plant in ("order", "dropped", "changed")
        return is_planted and not self.planted_at and self._left < 0 and fits

    def _spoil(self, send: Callable[..., None], arguments: Sequence[Any]) -> None:
        self.planted_at = time.monotonic()
        if self._plant == "order":
            self._held = send
        elif self._plant == "changed":
            cache, ids = arguments
            send(cache, [*ids[:-1], ids[-1] + 1])

    def ask(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> list[Any]:
        return self._link.ask(name, *arguments, drops=drops)

    def witness(self, *facts: Value) -> None:
        self._link.witness(*facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)
