"""Plays each fault alone beside a client that says "Hi", and tells how much longer that takes."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hearth.commands.server_client import table
from scripts.chaos.clients import GOOD
from scripts.chaos.faults import DELAYS_NOBODY
from scripts.chaos.request_bodies import Body, body_of
from scripts.chaos.scene import Play, Scene

DELAY_S_MAX: Final = 1.0
CALM_S: Final = 5.0  # in which it is told what it takes without a fault
REST_S: Final = 0.05
READY_S_MAX: Final = 60.0


def _hi() -> Body:
    return body_of("chat", [{"role": "user", "content": "Hi"}]) | {"max_tokens": 4}


@dataclass(frozen=True, slots=True)
class Delay:
    """What became of one client's requests while a fault was played."""

    fault: str
    asked: int
    unanswered: int
    calm_worst_s: float
    worst_s: float
    deaths: int  # processes that the fault ended

    @property
    def delay_s(self) -> float:
        return max(0.0, self.worst_s - self.calm_worst_s)

    @property
    def is_too_long(self) -> bool:
        """Tell whether it breaks the promise; a death, and asking much at once, set it aside."""
        return self.fault in DELAYS_NOBODY and not self.deaths and self.delay_s > DELAY_S_MAX


async def delays(scene: Scene, faults: Mapping[str, Play]) -> list[Delay]:
    """Play `faults` one after the other; enter what does not hold."""
    found = []
    for name, play in faults.items():
        await scene.server.until_ready(READY_S_MAX)
        found.append(await _beside(scene, name, play))
        if found[-1].is_too_long:
            scene.ledger.miss(f"{name} delays another's Hi by {found[-1].delay_s:.1f} s")
    return found


async def _beside(scene: Scene, name: str, play: Play) -> Delay:
    while (await scene.client.ask("chat", _hi(), allowed=GOOD)).kind != "answered":
        await asyncio.sleep(REST_S)  # what the fault before has left behind
    calm = asyncio.Event()
    asking = asyncio.create_task(_ask_until(scene, calm))
    await asyncio.sleep(CALM_S)
    calm.set()
    calm_waits = await asking
    scene.server.look()
    processes, is_over = len(scene.server.seen), asyncio.Event()
    with scene.ledger.playing(name):
        asking = asyncio.create_task(_ask_until(scene, is_over))
        await play(scene)
        is_over.set()
        waits = await asking
    await scene.server.until_ready(READY_S_MAX)
    return Delay(
        name,
        asked=len(waits),
        unanswered=sum(kind != "answered" for _, kind in waits),
        calm_worst_s=max(wait_s for wait_s, _ in calm_waits),
        worst_s=max(wait_s for wait_s, _ in waits),
        deaths=len(scene.server.seen) - processes,
    )


async def _ask_until(scene: Scene, is_over: asyncio.Event) -> list[tuple[float, str]]:
    """Say "Hi" until told to stop, and once more; return how long each end took, and which."""
    waits = list[tuple[float, str]]()
    is_last = False
    while not is_last:
        is_last = is_over.is_set()
        began = time.monotonic()
        end = await scene.client.ask("chat", _hi(), allowed=GOOD)
        waits.append((time.monotonic() - began, end.kind))
        await asyncio.sleep(REST_S)
    return waits


def delay_lines(found: Sequence[Delay]) -> list[str]:
    """Return the delays as people read them."""
    head = ["fault", "Hi asked", "not answered", "worst s, calm", "worst s", "delay s", "deaths"]
    rows = [
        [
            each.fault,
            each.asked,
            each.unanswered or "-",
            f"{each.calm_worst_s:.2f}",
            f"{each.worst_s:.2f}",
            f"{each.delay_s:.2f}" + (" TOO LONG" if each.is_too_long else ""),
            each.deaths or "-",
        ]
        for each in found
    ]
    return [table(head, rows)]


def delay_rows(found: Sequence[Delay]) -> list[dict[str, Any]]:
    return [asdict(each) | {"delay_s": each.delay_s} for each in found]
