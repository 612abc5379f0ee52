"""Restarts counted servers amid captured sessions, and counts what live sessions read again."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from hearth.worker.cache.block_hash import Tokens
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.prompt.prefill_cuts import CutRule
from scripts.harness.layouts.counted_server import CountedServer, Held, read_again, serving
from scripts.harness.layouts.counted_worker import CountedWorker
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript, Turn, ideals

MOMENTS: Final = 3  # of each session
SEED: Final = 22
DAY_SESSIONS: Final = 10
DAY_PAUSE_S: Final = 60.0  # between two turns of a day's session
DAY_GAP_S: Final = 600.0  # between two of its sessions


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


# ---------------------------------------------------------------- a day


@dataclass(slots=True)
class Day:
    """A day of sessions, and what each of them reads again after a restart at its end."""

    rows_bytes: int
    written_bytes: int
    refused: int  # writes, for want of the daily budget
    again: list[int]  # tokens, of each session's last prompt, the oldest first
    held: list[int]


def day(
    layout: ModelLayout,
    memory_gb: int,
    session: SessionScript,
    settings: Mapping[str, str],
    count: int = DAY_SESSIONS,
) -> Day:
    """Play so many sessions like this one, which share system and tools alone, and restart."""
    with serving(layout, memory_gb, session.marks, settings) as server:
        worker = server.start()
        sessions = [disguised(session, worker.rule, number) for number in range(count)]
        for each in sessions:
            worker.play(each, DAY_PAUSE_S, DAY_GAP_S)
        tips = [Held.whole(_longest(each).held) for each in sessions]
        tokens = sum(map(sum, ideals(sessions, worker.context_tokens)))
        tokens += sum(len(turn.answer) for each in sessions for turn in each.turns)
        disk = worker.manager.disk
        counts = disk.thread.report()["counts"] if disk is not None else {}
        worker.stop()
        again = read_again(server.start(), tips[::-1], session.marks)[::-1]
        return Day(
            rows_bytes=tokens * worker.manager.row_bytes(None),
            written_bytes=server.disk.written.total(),
            refused=counts.get("writes_refused_budget", 0),
            again=again,
            held=[len(tip.tokens) for tip in tips],
        )


def _longest(session: SessionScript) -> Turn:
    """Return the turn of a session's end: the last of its longest conversation."""
    return max(session.turns, key=lambda turn: turn.length)


def disguised(session: SessionScript, rule: CutRule, number: int) -> SessionScript:
    """Return a session of the same shape that shares nothing but system and tools with others.

    Tokens behind these are replaced one by one, those that mark messages stay.
    """
    kept = set(session.marks.header_ids)
    kept.update(turn.answer[-1] for turn in session.turns)
    kept.update(token for header in session.marks.assistant_headers for token in header)
    free = np.array(sorted(_words(session.turns) - kept))
    words = np.arange(int(free.max()) + 1, dtype=np.int32)
    words[free] = np.random.default_rng([SEED, number]).permutation(free)
    turns = tuple(_disguised(turn, rule, words) for turn in session.turns)
    return replace(session, name=f"{session.name}#{number}", turns=turns, _queries={})


def _words(turns: Sequence[Turn]) -> set[int]:
    return set(np.unique(np.concatenate([turn.held for turn in turns])).tolist())


def _disguised(turn: Turn, rule: CutRule, words: Tokens) -> Turn:
    tokens = _replaced(turn.tokens, rule, words)
    following = turn.next_tokens
    return replace(
        turn,
        ids=tokens.tolist(),
        tokens=tokens,
        answer=words[np.array(turn.answer)].tolist(),
        next_tokens=_replaced(following, rule, words) if following is not None else None,
    )


def _replaced(tokens: Tokens, rule: CutRule, words: Tokens) -> Tokens:
    end = rule.system_end(tokens)
    return np.concatenate([tokens[:end], words[tokens[end:]]])
