#!/usr/bin/env python
"""Plays faults against its own server under steady traffic, and checks that it keeps its promises.

    python -m scripts.chaos [--minutes N] [--seed S] [--only FAULT,...] [--workers N] [--json FILE]
    python -m scripts.chaos --alone [--only FAULT,...] [--json FILE]

Faults are played in random order, one at a time, while clients of all dialects go on. Each request
must have exactly one well-formed end: a whole answer (the one that a cold cache gave before the
faults, where that is known), or an error in its dialect; a connection that is cut counts only while
the proxy itself was dead, or where the client left. After each fault the server must answer again.
At the end nobody waits, no slot is busy, nothing that the server started is left, and memory is
back at its level.

Memory is compared like with like: the RSS of each process after the same warm-up (the known
conversations, and three times each fault that clients alone play), DELETE /v1/cache and a pause, at
the start and at the end. One that was started anew in between has only the warm-up behind it; so
that the figure says something, faults that end processes are dealt in the first two thirds only.
What sessions remember outlives DELETE /v1/cache and fills up in some 5,000 requests (8 kB of each
answer): 32 MB more are no miss. `python -m scripts.soak --requests 10000` holds it to 1 %.
With --alone each fault is played once, without traffic but one client that says "Hi", and a table
tells how much longer that client waits than in the 5 s before.
Exit status: 0 all of it held, 1 something did not, 2 the server does not start.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import resource
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from hearth.commands.server_client import table
from scripts.chaos.attacks import huge
from scripts.chaos.clients import GOOD, KEY, Client, Known, Ledger, known, steady
from scripts.chaos.delays import Delay, delay_lines, delay_rows, delays
from scripts.chaos.draft_tally import DraftTally, drafts_line
from scripts.chaos.faults import (
    BY_CLIENTS,
    ENDS_PROCESSES,
    PLAYS,
    drop_disk,
    launcher,
    own_disk,
    playable,
    pressure_file,
)
from scripts.chaos.judge_replies import KINDS
from scripts.chaos.own_server import MB, OwnServer, ServerError, rss_bytes
from scripts.chaos.request_bodies import body_of, pages
from scripts.chaos.scene import Play, Scene

WORKER: Final = "scripts.chaos.chaos_worker"
OPEN_FILES: Final = 4_096  # of this script: it opens more connections than the server has places
CLIENTS: Final = 3
REST_S: Final = 0.5  # of a client between two requests, at most
GAP_S: Final = 1.0  # between two faults
RECOVERY_S_MAX: Final = 60.0
IDLE_S_MAX: Final = 30.0
SETTLE_S: Final = 3.0
END_S_MAX: Final = 7.0  # SIGTERM: 5 s and FLUSH_WAIT_S
SLOW_SHARE: Final = 0.1  # of the run that slow readers may take
SLOW_S_MAX: Final = 60.0
KILLING_SHARE: Final = 2 / 3  # of the run: what ends processes is played in this part
WARM_ROUNDS: Final = 3  # after two of them the RSS of the proxy still rose by 5 %
GROWTH_MAX: Final = 0.05
GROWN_BYTES_MAX: Final = 32 * MB  # that less may be what sessions remember
FILES_MORE_MAX: Final = 8
# A killed server's log may end amid a line, but these stand for bugs of ours wherever they are.
BUGS: Final = ("Traceback", "failed by a bug", "thread broke", "link failed")
LOG_LINE: Final = re.compile(r"^(?=\d\d:\d\d:\d\d )", re.MULTILINE)  # a trace has no time
OUR_BREAK: Final = "\nPoisoned "  # what poisoned_worker raises, at its trace's end
HELLO: Final = [{"role": "user", "content": "Hello"}]


def bugs_in(log: str) -> Iterator[str]:
    """Yield the lines of a server's log that stand for a bug, as no poison prompt's own do."""
    for told in LOG_LINE.split(log):
        if OUR_BREAK not in told:
            yield from (line for line in told.splitlines() if any(bug in line for bug in BUGS))


@dataclass(frozen=True, slots=True)
class Level:
    """What a process holds when all is quiet."""

    role: str
    pid: int
    rss_bytes: int
    files: int

    def has_grown_since(self, was: "Level") -> bool:
        """Tell whether it is far above what it `was`, by its share and by its bytes."""
        grown = self.rss_bytes - was.rss_bytes
        return grown > GROWN_BYTES_MAX and grown > GROWTH_MAX * was.rss_bytes


@dataclass(slots=True)
class Run:
    """One chaos run. Owner: the event loop."""

    scene: Scene
    faults: dict[str, Play]
    book: list[Known] = field(default_factory=list)
    before: list[Level] = field(default_factory=list)
    after: list[Level] = field(default_factory=list)
    drafts: DraftTally = field(default_factory=DraftTally)
    stop_s: float = 0.0

    @property
    def ledger(self) -> Ledger:
        return self.scene.ledger

    # ------------------------------------------------------------ the run

    async def play(self, minutes: float, talks: int) -> None:
        """Play everything, and enter what does not hold. `talks` have answers that are known."""
        server, rng = self.scene.server, self.scene.rng

        async def forget() -> None:
            await server.cache(clears=True)

        every = pages(rng, talks)
        self.book = await known(self.scene.client, every, forget)
        print(f"{len(self.book)} of {len(every)} pages have an answer to hold the server to")
        self.before = await self._level()
        async with self._traffic():
            await self._faults(time.monotonic(), minutes * 60)
        await self._count_drafts()
        self.after = await self._level()
        await self._count_drafts()
        self._compare()
        self._end()

    @contextlib.asynccontextmanager
    async def _traffic(self) -> AsyncIterator[None]:
        """Steady clients for as long as this is open; each ends the request that it is at."""
        running = asyncio.Event()
        running.set()

        async def be_client(number: int) -> None:
            rng = random.Random(number)
            while running.is_set():
                await steady(self.scene.client, self.book, rng)
                await asyncio.sleep(rng.random() * REST_S)

        clients = [asyncio.create_task(be_client(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            running.clear()
            await asyncio.gather(*clients)

    async def _faults(self, began: float, whole_s: float) -> None:
        """Deal the faults, each once before any comes again, until all were and time is over."""
        deck, rounds = list[str](), 0
        while (spent_s := time.monotonic() - began) < whole_s or (deck and rounds == 1):
            if not deck:
                deck, rounds = (
                    self.scene.rng.sample(sorted(self.faults), len(self.faults)),
                    rounds + 1,
                )
            name = deck.pop()
            if rounds > 1 and spent_s > whole_s * KILLING_SHARE and name in ENDS_PROCESSES:
                await asyncio.sleep(GAP_S)
                continue
            await self._one(name)
            await asyncio.sleep(GAP_S)

    async def _one(self, name: str) -> None:
        print(f"{name} ...", flush=True)
        await self._count_drafts()  # before a worker ends with its counts
        with self.ledger.playing(name):
            await self.faults[name](self.scene)
            lifted = time.monotonic()
            recovered_s = await self._recovered(lifted)
        self.ledger.tally(name).recoveries_s.append(recovered_s)
        if recovered_s > RECOVERY_S_MAX:
            self.ledger.miss(f"{name}: no answer {RECOVERY_S_MAX:g} s after it")

    async def _recovered(self, since: float) -> float:
        """Wait for an answer and for all workers; return how long the answer took."""
        body = body_of("chat", HELLO) | {"max_tokens": 2}
        while time.monotonic() - since < RECOVERY_S_MAX:
            end = await self.scene.client.ask("chat", body, allowed=GOOD)
            if end.kind == "answered":
                took_s = time.monotonic() - since
                await self.scene.server.until_ready(RECOVERY_S_MAX)
                return took_s
            await asyncio.sleep(0.1)
        return time.monotonic() - since

    # ------------------------------------------------------------ what must hold

    async def _level(self) -> list[Level]:
        """Warm up, wait until nobody waits, empty the cache, and measure."""
        with self.ledger.playing("(warm-up)"):
            for each in self.book:
                body = each.page.body | {"stream": True}
                await self.scene.client.ask(each.page.dialect, body, expected=each.said)
            for name in BY_CLIENTS * WARM_ROUNDS:
                if name in self.faults:
                    await self.faults[name](replace(self.scene, slow_s=0.0))
        await self._idle()
        cache = await self.scene.server.cache(clears=True)
        for row in cache.get("workers", [{"error": "no answer"}]):
            if "error" in row or any(slot["busy"] for slot in row.get("slots", ())):
                self.ledger.miss(f"a slot is busy, or not told: {row.get('error', row)}")
        await asyncio.sleep(SETTLE_S)
        family = self.scene.server.look()
        if not family:
            raise ServerError(f"the server is gone; its log ends:\n{self.scene.server.log_tail()}")
        family[1:] = sorted(family[1:], key=_worker_number)
        roles = ["proxy", *(f"worker {number}" for number in range(len(family) - 1))]
        return [
            Level(role, process.pid, rss_bytes(process), process.num_fds())
            for role, process in zip(roles, family, strict=True)
        ]

    async def _count_drafts(self) -> None:
        self.drafts.take((await self.scene.server.cache()).get("workers", []))

    async def _idle(self) -> None:
        deadline = time.monotonic() + IDLE_S_MAX
        rows: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            await asyncio.sleep(1.2)  # a heartbeat of each worker, sent from now on
            rows = await self.scene.server.workers()
            if rows and not any(row["running"] + row["waiting"] + row["in_flight"] for row in rows):
                return
        self.ledger.miss(f"requests are left in the queue: {rows}")

    def _compare(self) -> None:
        before = {level.role: level for level in self.before}
        if [level.role for level in self.after] != list(before):
            self.ledger.miss(f"processes at the end: {[level.role for level in self.after]}")
            return
        for level in self.after:
            was = before[level.role]
            growth = level.rss_bytes / was.rss_bytes - 1
            if level.has_grown_since(was):
                self.ledger.miss(f"memory of the {level.role} is {growth:+.1%} above its level")
            if level.files > was.files + FILES_MORE_MAX:
                self.ledger.miss(f"the {level.role} has {was.files} -> {level.files} open files")

    def _end(self) -> None:
        """End the server as its user would: nothing of it may be left."""
        server, ledger = self.scene.server, self.ledger
        code, self.stop_s = server.stop()
        if code != 0 or self.stop_s > END_S_MAX:
            ledger.miss(f"SIGTERM: exit code {code} after {self.stop_s:.1f} s")
        if left := server.left():
            ledger.miss(f"orphans: {left}")
        if files := sorted(path.name for path in server.instance_dir.glob("*")):
            ledger.miss(f"left in RUN_DIR: {files}")
        if ledger.begun != ledger.ended:
            ledger.miss(f"{ledger.begun} requests and {ledger.ended} ends")
        for line in bugs_in(server.log.read_text(errors="replace")):
            ledger.miss(f"log: {line[:200]}")

    # ------------------------------------------------------------ telling

    def report(self) -> dict[str, Any]:
        """Return what --json writes."""
        return {
            "faults": {
                name: {
                    "times": tally.times,
                    "ends": dict(tally.ends),
                    "worst_end_s": round(tally.worst_end_s, 2),
                    "worst_recovery_s": round(max(tally.recoveries_s, default=0.0), 2),
                }
                for name, tally in self.ledger.tallies.items()
            },
            "requests": self.ledger.begun,
            "memory": [
                {
                    "role": late.role,
                    "rss_before": early.rss_bytes,
                    "rss_after": late.rss_bytes,
                    "files_before": early.files,
                    "files_after": late.files,
                    "is_same_process": early.pid == late.pid,
                }
                for early, late in zip(self.before, self.after, strict=False)
            ],
            "stop_s": round(self.stop_s, 2),
            "drafts": dict(self.drafts.total),
            "not_played": sorted(PLAYS.keys() - playable().keys()),
            "misses": dict(self.ledger.misses),
        }


def _worker_number(process: psutil.Process) -> int:
    arguments = process.cmdline()
    return int(arguments[arguments.index("--worker-id") + 1])


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as people read it."""
    kinds = [
        kind for kind in KINDS if any(row["ends"].get(kind) for row in report["faults"].values())
    ]
    head = ["fault", "times", *kinds, "worst end s", "worst recovery s"]
    rows = []
    for name, row in sorted(report["faults"].items()):
        ends = [row["ends"].get(kind, 0) for kind in kinds]
        recovery = row["worst_recovery_s"] or "-"
        rows.append([name, row["times"] or "-", *ends, row["worst_end_s"], recovery])
    told = [table(head, rows), ""]
    memory = [
        [
            row["role"],
            f"{row['rss_before'] / MB:.1f}",
            f"{row['rss_after'] / MB:.1f}",
            f"{row['rss_after'] / row['rss_before'] - 1:+.1%}",
            row["files_before"],
            row["files_after"],
            "the same" if row["is_same_process"] else "started anew",
        ]
        for row in report["memory"]
    ]
    told += [table(["process", "MB", "MB after", "growth", "files", "after", "is"], memory), ""]
    told.append(f"{report['requests']:,} requests, ended by SIGTERM in {report['stop_s']} s")
    told.append(drafts_line(report["drafts"]))
    if report["not_played"]:
        told.append(f"not played, this system does not let us: {', '.join(report['not_played'])}")
    told += [f"MISSED {count}x: {text}" for text, count in report["misses"].items()]
    return [*told, "verdict: " + ("MISSED" if report["misses"] else "all of it held")]


# ---------------------------------------------------------------- command line


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults, comma-separated: " + ", ".join(PLAYS))
    parser.add_argument("--alone", action="store_true", help='beside one "Hi" only')
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--flood", type=int, default=500, help="requests of a flood")
    parser.add_argument("--talks", type=int, default=6, help="conversations with known answers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.only = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := set(options.only) - playable().keys():
        parser.error(f"not played here: {', '.join(sorted(unknown))}")
    return options


async def chaos(options: argparse.Namespace) -> int:
    faults = {
        name: play for name, play in playable().items() if name in options.only or not options.only
    }
    settings = {"WORKERS": str(options.workers), "MAX_KV_SIZE_GB": "1", "LOG_LEVEL": "INFO"}
    settings["PROXY_API_KEY"] = KEY
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(OPEN_FILES, files_max) if files_max != resource.RLIM_INFINITY else OPEN_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files_max))
    server = OwnServer(settings, launcher(), WORKER)
    server.set("PRESSURE_FILE", str(pressure_file(server)))
    ledger = Ledger()
    slow_s = min(SLOW_S_MAX, options.minutes * 60 * SLOW_SHARE)
    client = Client(server.port, ledger)
    scene = Scene(server, client, ledger, random.Random(options.seed), options.flood, slow_s)
    run = Run(scene, faults)
    found: list[Delay] = []
    own_disk(server.kv_dir)
    try:
        await server.started()
        if "huge bodies" in faults:
            huge()  # made before anything is measured
        if options.alone:
            found = await delays(scene, faults)
        else:
            await run.play(options.minutes, options.talks)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        server.close(keeps=bool(ledger.misses))
        drop_disk(server.kv_dir)
    report = run.report() | {"delays": delay_rows(found)}
    print(*(delay_lines(found) if options.alone else []), *lines(report), sep="\n")
    if ledger.misses:
        print(f"the server's log: {server.log}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if ledger.misses else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(chaos(options_of())))
