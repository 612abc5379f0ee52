"""Restarts counted servers amid captured sessions, and counts what live sessions read again."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hearth.worker.kv.live_slot import LiveSlot
from scripts.harness.layouts.counted_server import CountedServer, Held, read_again, serving
from scripts.harness.layouts.counted_worker import CountedWorker
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript

MOMENTS: Final = 3  # of each session
SEED: Final = 22


@dataclass(slots=True)
class Restart:
    """What the live caches of a moment lost in a restart, in tokens each."""

    session: str
    at_s: float
    held: list[int] = field(default_factory=list)  # tokens that each live cache held
    again: list[int] = field(default_factory=list)  # of those, what is read again


def killed(
    layout: ModelLayout, memory_gb: int, session: SessionScript, settings: Mapping[str, str]
) -> list[Restart]:
    """Kill a worker at random moments of a session; nothing that waits is written."""
    return _restarted(layout, memory_gb, session, settings, is_told=False)


def stopped(
    layout: ModelLayout, memory_gb: int, session: SessionScript, settings: Mapping[str, str]
) -> list[Restart]:
    """End a worker by SIGTERM at the same moments."""
    return _restarted(layout, memory_gb, session, settings, is_told=True)


def _restarted(
    layout: ModelLayout,
    memory_gb: int,
    session: SessionScript,
    settings: Mapping[str, str],
    is_told: bool,
) -> list[Restart]:
    with serving(layout, memory_gb, session.marks, settings) as server:
        worker = server.start()
        began_s = server.clock.elapsed_s
        worker.play(session)
        length_s = server.clock.elapsed_s - began_s
    chance = random.Random(f"{SEED} {session.name}")
    found = []
    for _ in range(MOMENTS):
        until_s = chance.uniform(0.05, 1.0) * length_s
        with serving(layout, memory_gb, session.marks, settings) as server:
            found.append(_restart(server, session, until_s, is_told))
    return found


def _restart(
    server: CountedServer, session: SessionScript, until_s: float, is_told: bool
) -> Restart:
    worker = server.start()
    worker.play(session, until_s=until_s)
    held = live(worker)
    if is_told:
        worker.stop()
    else:
        worker.kill()
    again = read_again(server.start(), held, session.marks)
    return Restart(session.name, until_s, [len(each.tokens) for each in held], again)


def live(worker: CountedWorker) -> list[Held]:
    """Return what each live cache holds that serves a request, or served one."""
    slots = [slot for slot in worker.manager.slots if not slot.is_spare]
    return [held for slot in slots if len((held := _held(worker, slot)).tokens)]


def _held(worker: CountedWorker, slot: LiveSlot) -> Held:
    """Return what a slot holds. Of a prompt that is being read, its client sends all again."""
    tokens = worker.held(slot)
    prompt = worker.prompt_read_in(slot)
    return Held.whole(tokens) if prompt is None else Held(tokens, prompt)
