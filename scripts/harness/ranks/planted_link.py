"""Spoils one operation on its way to the other ranks, to see that it is found."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_link import OnEvent

Plant = Literal["none", "order", "dropped", "changed", "noise"]
OPERATIONS: Final = ("prefill", "step", "copy_rows", "put_rows", "trim", "add")
SPOILED: Final = {"order": OPERATIONS, "dropped": OPERATIONS, "changed": ("prefill",)}


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
        self._held: list[Callable[[], None]] = []
        self.planted_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    @property
    def on_event(self) -> OnEvent:
        return self._link.on_event

    @on_event.setter
    def on_event(self, value: OnEvent) -> None:
        self._link.on_event = value

    def send(self, name: str, *arguments: Any, drops: Sequence[int] = ()) -> None:
        send = functools.partial(self._link.send, name, drops=drops)
        self._left -= 1
        if self._left < 0 and not self.planted_at and name in SPOILED.get(self._plant, ()):
            self.planted_at = time.monotonic()
            if self._plant == "order":
                self._held.append(functools.partial(send, *arguments))
            elif self._plant == "changed":
                cache, ids = arguments
                send(cache, [*ids[:-1], ids[-1] + 1])
            return
        send(*arguments)
        while self._held:
            self._held.pop()()
