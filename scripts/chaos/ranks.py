#!/usr/bin/env python
"""Kills and stops ranks of a model at random moments, and holds the server to how it must recover.

    python -m scripts.chaos.ranks [--kills 30] [--stops 4] [--ranks 2] [--fixture qwen3] [--seed S]

Each time two requests run, one that is read and one that is answered, and a rank is killed (or
stopped: SIGSTOP) amid the prefill, amid the decoding or while the disk is written. Each request
must end in one error at once (or within STALL_SECONDS), all ranks must be started anew within
RECOVERY_S, so that what is left is the time of their load, a known prompt must be answered as a
cold cache answered it, and none of the old processes may be left.
Exit status: 0 all of it held; 1 not so; 2 the server does not start.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from hearth.commands.server_client import table
from scripts.chaos.judge_replies import End, Said, judge
from scripts.chaos.own_server import OwnServer, ServerError, is_alive
from scripts.chaos.rank_server import followers_of, rank_settings, worker_of
from scripts.fixtures.rank_fixtures import RANKED_NAMES, rank_fixture_dir
from scripts.harness.ranks.rank_talk import errand, system_message, user_message

Moment = Literal["prefill", "decode", "disk"]
MOMENTS: Final[tuple[Moment, ...]] = ("prefill", "decode", "disk")
ERROR_S_MAX: Final = 2.0  # from a kill to the errors of those who waited
RECOVERY_S: Final = 5.0  # beyond what a load takes
STALL_SECONDS: Final = 12
STALL_MARGIN_S: Final = 3.0
LEFT_S_MAX: Final = 2.0  # until the processes of before are gone
ANSWER_TOKENS: Final = 300
READ_RULES: Final = 600  # sentences of a prompt whose prefill is interrupted: some 10,000 tokens
WAIT_S_MAX: Final = 120.0
WORDS: Final = re.compile(rb'"(content|reasoning_content)": ?"[^"]')  # a delta that says something


@dataclass(slots=True)
class Asked:
    """One request: what came of it, and when."""

    end: End | None = None
    ended_at: float = 0.0
    first_at: float = 0.0  # when its first bytes came; 0 = none yet
    raw: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True, slots=True)
class Blow:
    """What one kill or stop led to, in seconds from it."""

    signal: str
    rank: int
    moment: Moment
    is_amid: bool  # what was to be interrupted ran when it came
    kinds: list[str]  # how those who waited ended
    error_s: float  # the last of those ends; 0 where none waited any more
    spawned_s: float  # until the next worker was started: all but its own load
    back_s: float  # until all ranks were ready
    left: int  # processes of before that outlived it
    is_answer_cold: bool  # whether the known prompt was answered as it was of a cold cache
    cached: int  # tokens of the known prompt that came from disk
    said: str  # of the first error
    misses: list[str]


async def ask(port: int, body: dict[str, Any], asked: Asked) -> Asked:
    """Stream one chat completion into `asked`, until its connection ends."""
    content = json.dumps({"model": "m", "temperature": 0, "stream": True} | body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + content)
            while chunk := await reader.read(65_536):
                asked.raw += chunk
                if WORDS.search(chunk):
                    asked.first_at = asked.first_at or time.monotonic()
            writer.close()
        asked.end = judge("chat", True, bytes(asked.raw))
    except (OSError, TimeoutError) as error:
        asked.end = End("hung" if isinstance(error, TimeoutError) else "cut", repr(error))
    asked.ended_at = time.monotonic()
    return asked


@dataclass(slots=True)
class Scene:
    """A server, what it answers to a known prompt, and chance. Owner: the event loop."""

    server: OwnServer
    rng: random.Random
    known: dict[str, Any]
    cold: Said | None = None
    number: int = 0

    def fresh(self, rules: int, words: int) -> list[dict[str, str]]:
        """Return a prompt that nobody has sent."""
        self.number += 1
        text = f"{self.number}: {errand(self.rng.randrange(10**6), words)}"
        system = system_message(rules)
        return [{"role": "system", "content": f"{text} {system['content']}"}, user_message(text)]

    async def say(self, body: dict[str, Any]) -> Asked:
        return await ask(self.server.port, body, Asked())


async def play(scene: Scene, sent: signal.Signals, moment: Moment) -> Blow:
    """Let a rank end at `moment` and return what that led to."""
    server, rng = scene.server, scene.rng
    worker, followers = worker_of(server), followers_of(server)
    ranks = [worker, *followers]
    old = [*ranks, *worker.children(recursive=True)]
    rank = rng.randrange(len(ranks))
    waiting, tasks = await _under_way(scene, moment)
    is_amid = _is_amid(moment, waiting)
    began = time.monotonic()
    ranks[rank].send_signal(sent)
    await asyncio.gather(*tasks)
    ended = [asked for asked in waiting if asked.ended_at >= began]
    error_s = max((asked.ended_at - began for asked in ended), default=0.0)
    spawned, back = await _back(server, worker, began)
    left = await _left(old)
    known = await scene.say(scene.known)
    kinds = [asked.end.kind if asked.end else "none" for asked in ended]
    blow = Blow(
        sent.name,
        rank,
        moment,
        is_amid,
        kinds,
        round(error_s, 2),
        round(spawned, 2),
        round(back, 2),
        left,
        known.end is not None and known.end.said == scene.cold,
        cached_tokens(bytes(known.raw)),
        next((asked.end.detail for asked in ended if asked.end and asked.end.detail), ""),
        [],
    )
    return judged(blow, ended)


async def _under_way(scene: Scene, moment: Moment) -> tuple[list[Asked], list[asyncio.Task[Asked]]]:
    """Return requests that run, `moment` being what at least one of them is at."""
    port, rng = scene.server.port, scene.rng
    if moment == "disk":  # what an answer has brought is written as it ends
        await scene.say({"messages": scene.fresh(60, 40), "max_tokens": 4})
        body = {"messages": scene.fresh(60, 40), "max_tokens": ANSWER_TOKENS}
        bodies, wait_s = [body], rng.random() * 0.2
    elif moment == "decode":
        body = {"messages": scene.fresh(4, 20), "max_tokens": ANSWER_TOKENS}
        bodies, wait_s = [body, body | {"messages": scene.fresh(4, 20)}], 0.0
    else:
        short = {"messages": scene.fresh(4, 20), "max_tokens": ANSWER_TOKENS}
        bodies = [short, {"messages": scene.fresh(READ_RULES, 40), "max_tokens": 8}]
        wait_s = 0.1 + rng.random() * 0.6
    waiting = [Asked() for _ in bodies]
    tasks = [
        asyncio.create_task(ask(port, body, asked))
        for body, asked in zip(bodies, waiting, strict=True)
    ]
    if moment == "decode":
        while not all(asked.first_at or asked.end for asked in waiting):
            await asyncio.sleep(0.005)
        wait_s = rng.random() * 0.3
    await asyncio.sleep(wait_s)
    return waiting, tasks


def _is_amid(moment: Moment, waiting: Sequence[Asked]) -> bool:
    """Tell whether the request that matters is read, or answered; of the disk nobody can tell."""
    if moment == "prefill":
        return waiting[-1].first_at == 0.0
    return any(asked.end is None and (moment == "disk" or asked.first_at) for asked in waiting)


async def _back(server: OwnServer, old: psutil.Process, began: float) -> tuple[float, float]:
    """Return the seconds until another worker than `old` was there, and until it was ready."""
    spawned = 0.0
    while (waited := time.monotonic() - began) < WAIT_S_MAX:
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
            if worker_of(server).pid != old.pid:
                spawned = spawned or waited
                if (await server.health()).get("status") == "ok":
                    return spawned, time.monotonic() - began
        await asyncio.sleep(0.05)
    return spawned or WAIT_S_MAX, WAIT_S_MAX


async def _left(old: Sequence[psutil.Process]) -> int:
    deadline = time.monotonic() + LEFT_S_MAX
    while (left := sum(map(is_alive, old))) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


def cached_tokens(raw: bytes) -> int:
    """Return the cached tokens that a stream's usage tells."""
    _, _, rest = raw.rpartition(b'"cached_tokens":')
    digits = rest.lstrip().split(b"}")[0].split(b",")[0]
    return int(digits) if digits.isdigit() else -1


def judged(blow: Blow, ended: Sequence[Asked]) -> Blow:
    """Return `blow` with what of it does not hold."""
    is_stop = blow.signal == "SIGSTOP"
    limit = STALL_SECONDS + STALL_MARGIN_S if is_stop else ERROR_S_MAX
    misses = []
    for asked in ended:
        if asked.end is None or asked.end.kind not in ("answered", "failed", "busy"):
            misses.append(f"a request ended {asked.end}")
    if blow.error_s > limit:
        misses.append(f"an error came after {blow.error_s} s, allowed are {limit} s")
    spawned_max = RECOVERY_S + (limit if is_stop else 0)
    if blow.spawned_s > spawned_max:
        misses.append(f"started anew after {blow.spawned_s} s, allowed are {spawned_max:.1f} s")
    if blow.left:
        misses.append(f"{blow.left} processes of before are left")
    if not blow.is_answer_cold:
        misses.append("a known prompt was answered otherwise than of a cold cache")
    return Blow(**(asdict(blow) | {"misses": misses}))


def _row(blow: Blow) -> list[Any]:
    moment = blow.moment if blow.is_amid else f"{blow.moment} (missed)"
    figures = [
        blow.error_s,
        blow.spawned_s,
        blow.back_s,
        blow.left,
        blow.is_answer_cold,
        blow.cached,
    ]
    return [blow.signal, blow.rank, moment, "+".join(blow.kinds), *figures]


def lines(blows: Sequence[Blow], start_s: float) -> list[str]:
    head = [
        "signal",
        "rank",
        "moment",
        "ends",
        "error s",
        "anew s",
        "back s",
        "left",
        "cold",
        "cached",
    ]
    rows = [_row(blow) for blow in blows]
    told = [table(head, rows), f"a start took {start_s:.1f} s"]
    for name in sorted({blow.signal for blow in blows}):
        mine = [blow for blow in blows if blow.signal == name]
        errors, backs = [b.error_s for b in mine], [b.back_s for b in mine]
        anew = [b.spawned_s for b in mine]
        told.append(
            f"{name}: {len(mine)} times; error after {statistics.median(errors):.2f} s, at most "
            f"{max(errors):.2f} s; started anew after {statistics.median(anew):.2f} s, at most "
            f"{max(anew):.2f} s; back after {statistics.median(backs):.1f} s, at most "
            f"{max(backs):.1f} s; known prompts cold-equal {sum(b.is_answer_cold for b in mine)}"
        )
    told += [
        f"MISSED {b.signal} rank {b.rank} amid {b.moment}: {m}" for b in blows for m in b.misses
    ]
    return told


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fixture", choices=RANKED_NAMES, default="qwen3")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


async def chaos(options: argparse.Namespace) -> int:
    model = rank_fixture_dir(options.fixture)
    settings = rank_settings(model, options.ranks, STALL_SECONDS=str(STALL_SECONDS))
    server, rng = OwnServer(settings), random.Random(options.seed)
    blows: list[Blow] = []
    try:
        began = time.monotonic()
        await server.started()
        start_s = time.monotonic() - began
        messages = [system_message(), user_message(errand(3, 40))]
        usage = {"stream_options": {"include_usage": True}}
        known: dict[str, Any] = {"messages": messages, "max_tokens": 24} | usage
        scene = Scene(server, rng, known)
        cold = (await scene.say(known | {"use_kv_cache": False})).end
        scene.cold = cold.said if cold is not None else None
        assert scene.cold is not None, cold
        signals = [signal.SIGKILL] * options.kills + [signal.SIGSTOP] * options.stops
        for number, sent in enumerate(signals):
            blows.append(await play(scene, sent, MOMENTS[number % len(MOMENTS)]))
            print(*(f"{blow}" for blow in blows[-1:]), flush=True)
        code, stop_s = server.stop()
        left = server.left()
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        is_missed = not blows or any(blow.misses for blow in blows)
        server.close(keeps=is_missed)
    print(*lines(blows, start_s), sep="\n")
    print(f"SIGTERM: ended with {code} after {stop_s:.1f} s, {len(left)} processes left")
    if options.json:
        report = {"start_s": start_s, "blows": [asdict(blow) for blow in blows], "left": len(left)}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if is_missed:
        print(f"the server's log: {server.log}")
    return 1 if is_missed or left or code else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(chaos(options_of())))
