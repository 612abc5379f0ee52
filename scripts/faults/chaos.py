"""Plays faults against its own server under steady traffic, and checks that it keeps its promises.

Faults come in random order, one at a time, each once before any comes again. Each request must have
one well-formed end: a whole answer (the one that a cold cache gave, where that is known), or an
error in its dialect; a connection that is cut counts only while the proxy itself was dead, or where
the client left. After each fault the server must answer again. At the end nobody waits, no slot is
busy, nothing that the server started is left, its log tells no bug, and the proxy is back at its
memory and files. With --ranks the model runs over several processes, of which one
is struck.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Literal

import psutil

from hearth.commands.bench.servers.started_server import _runs, _until
from hearth.commands.server_client import table
from hearth.shared.zmq_transport import SILENCE_S_MAX
from scripts.faults.load import PATHS, Asked, Load, body_of, loaded_server
from scripts.faults.own_server import MB, Held, OwnServer, ServerError
from scripts.fixtures.fixture_cache import fixture_dir

DISK_S: Final = 6.0
STALL_SECONDS: Final = 12  # of ranks
HUNG_S_MAX: Final = max(SILENCE_S_MAX, STALL_SECONDS) + 10.0
ERROR_S_MAX: Final = 5.0  # from a kill to the errors of those who waited, on a busy machine
ANEW_S_MAX: Final = 10.0  # from a worker's end to the start of the next
GONE_S_MAX: Final = 5.0  # until the processes of before are gone
RECOVERY_S_MAX: Final = 60.0
END_S_MAX: Final = 7.0  # SIGTERM: 5 s, and 2 s for the disk
FILES_MORE_MAX: Final = 8
BUGS: Final = ("Traceback", "failed by a bug", "thread broke", "link failed")


@dataclass(slots=True)
class Chaos:
    """One run. Owner: the event loop. The methods behind `flood` play a fault, and lift it."""

    server: OwnServer
    load: Load
    rng: random.Random
    times: Counter[str] = field(default_factory=Counter)  # that each fault was played
    recovery_s: dict[str, float] = field(default_factory=dict)  # the longest of each

    async def run(self, faults: Sequence[str], minutes: float) -> list[Held]:
        """Play everything, enter what does not hold, and return what was held before and after."""
        await self.load.learn(lambda: self.server.told("/v1/cache", "DELETE"))
        known, different = self.load.known, len(set(self.load.known.values()))
        print(f"{len(known)} of {len(self.load.pages)} pages have an answer, {different} differ")
        self.load.ledger.demand(
            different >= len(known) / 2, "known answers are alike: they hold nothing"
        )
        with self.load.ledger.playing("flood"):
            await self.flood()  # a server that has seen one is warm
        before = await self._quiet()
        end = time.monotonic() + minutes * 60
        async with self._traffic():
            while not self.times or time.monotonic() < end:
                for fault in self.rng.sample(faults, len(faults)):
                    await self._one(fault)
        after = await self._quiet()
        self.compare(before[0], after[0])
        self._end()
        return [*before, *after]

    @contextlib.asynccontextmanager
    async def _traffic(self) -> AsyncIterator[None]:
        """Steady clients for as long as this is open; each ends the request that it is at."""
        is_over = asyncio.Event()

        async def be_client() -> None:
            while not is_over.is_set():
                await self.load.send(self.load.draw())
                await asyncio.sleep(0.5 * self.rng.random())

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(be_client())
            yield
            is_over.set()

    async def _one(self, name: str) -> None:
        ledger = self.load.ledger
        print(f"{name} ...", flush=True)
        await asyncio.sleep(1.0)
        self.times[name] += 1
        with ledger.playing(name):
            await FAULTS[name](self)
            began = time.monotonic()
            while not await self._answers() and time.monotonic() - began < RECOVERY_S_MAX:
                await asyncio.sleep(0.1)
            took_s = time.monotonic() - began
            await self.server.until_ready(RECOVERY_S_MAX)
        self.recovery_s[name] = max(took_s, self.recovery_s.get(name, 0.0))
        ledger.demand(took_s <= RECOVERY_S_MAX, f"{name}: no answer {RECOVERY_S_MAX:g} s after it")
        ledger.demand(
            ledger.failed_s <= ERRORS_S_MAX.get(name, RECOVERY_S_MAX),
            f"{name}: an error came after {ledger.failed_s:.1f} s",
        )

    async def _answers(self) -> bool:
        asked = Asked("Hi", "chat", self.load.post(PATHS["chat"], body_of("chat", "Hi")))
        return (await self.load.send(asked)).kind == "answered"

    # ------------------------------------------------------------ what must hold at the end

    async def _quiet(self) -> list[Held]:
        """Wait until nobody waits, empty the cache, and return what each process holds."""
        deadline = time.monotonic() + 30
        is_busy = True
        while is_busy and time.monotonic() < deadline:
            await asyncio.sleep(1.2)  # a heartbeat of each worker, sent from now on
            rows = (await self.server.told("/health")).get("workers", [])
            is_busy = any(row["running"] + row["waiting"] + row["in_flight"] for row in rows)
        self.load.ledger.demand(not is_busy, f"requests are left in the queue: {rows}")
        cleared = await self.server.told("/v1/cache", "DELETE")
        for row in cleared.get("workers", [{"error": "none"}]):
            self.load.ledger.demand(
                "error" not in row and not any(slot["busy"] for slot in row.get("slots", ())),
                f"a slot is busy, or not told: {row.get('error', row)}",
            )
        await asyncio.sleep(3.0)
        return self.server.held()

    def compare(self, was: Held, now: Held) -> None:
        """Enter where a process holds far more memory or files than it did."""
        grown = now.rss - was.rss
        self.load.ledger.demand(
            grown <= max(32 * MB, 0.05 * was.rss),  # less may be what sessions remember
            f"memory of the {now.role} is {grown / MB:.0f} MB above its level",
        )
        self.load.ledger.demand(
            now.files <= was.files + FILES_MORE_MAX,
            f"the {now.role} has {was.files} -> {now.files} open files",
        )

    def _end(self) -> None:
        """End the server as its user would: nothing of it may be left."""
        server, ledger = self.server, self.load.ledger
        code, stop_s = server.stop()
        left = server.left(), [path.name for path in server.directory.glob("run/*/*")]
        ledger.demand(
            code == 0 and stop_s <= END_S_MAX and not any(left),
            f"SIGTERM: exit code {code} after {stop_s:.1f} s; left are {left}",
        )
        ledger.demand(
            ledger.begun == ledger.ended, f"{ledger.begun} requests and {ledger.ended} ends"
        )
        for line in server.log.read_text(errors="replace").splitlines():
            ledger.demand(not any(bug in line for bug in BUGS), f"log: {line[:200]}")

    # ------------------------------------------------------------ faults

    async def flood(self) -> None:
        await asyncio.gather(*(self.load.send(self.load.draw()) for _ in range(150)))

    async def lost(self, sent: signal.Signals, limit_s: float) -> None:
        """Strike one rank; in time all are gone, and a worker starts anew."""
        ranks, before, ledger = self.server.ranks(), set(self.server.look()), self.load.ledger
        _signal([self.rng.choice(ranks)], sent)
        ledger.demand(
            await _until(lambda: not any(map(_runs, ranks)), limit_s + GONE_S_MAX),
            f"{ledger.stage}: {sum(map(_runs, ranks))} processes outlived it",
        )
        _signal(ranks, signal.SIGCONT)  # those that outlived it
        ledger.demand(
            await _until(lambda: not before.issuperset(self.server.look()), ANEW_S_MAX),
            f"{ledger.stage}: no other worker {ANEW_S_MAX:g} s after it",
        )

    async def stopped(
        self, which: Literal["rank", "worker", "all"], stop_s: float, times: int = 1
    ) -> None:
        """Stopped for a moment, then continued."""
        everyone = self.server.look()
        struck = everyone[1:] if which == "worker" else everyone
        if which == "rank":
            struck = [self.rng.choice(self.server.ranks())]
        for _ in range(times):
            _signal(struck, signal.SIGSTOP)
            await asyncio.sleep(stop_s)
            _signal(struck, signal.SIGCONT)
            await asyncio.sleep(0.05)

    async def proxy_killed(self) -> None:
        """And started again at once, amid its workers' end."""
        server, family = self.server, self.server.look()
        with self.load.ledger.proxy_down():
            family[0].kill()
            server.process.wait()
            server.start()
            self.load.ledger.demand(
                await _until(lambda: not any(map(_runs, family)), GONE_S_MAX),
                f"proxy killed: a worker outlived it by {GONE_S_MAX:g} s",
            )
            self.load.ledger.demand(
                await server.until_ready(RECOVERY_S_MAX),
                f"proxy killed: no start after it; {server.log_tail(3)}",
            )

    async def disk_full(self) -> None:
        """No file grows beyond a page: EFBIG in place of ENOSPC, which needs a disk of its own."""
        if sys.platform != "linux":
            return
        before = {each: each.rlimit(psutil.RLIMIT_FSIZE) for each in self.server.look()[1:]}
        for worker, (_, most) in before.items():
            worker.rlimit(psutil.RLIMIT_FSIZE, (4_096, most))
        await asyncio.sleep(DISK_S)
        for worker, limits in before.items():
            worker.rlimit(psutil.RLIMIT_FSIZE, limits)

    async def disk_slow(self) -> None:
        path = self.server.directory / "slow-disk"
        path.touch()
        await asyncio.sleep(DISK_S)
        path.unlink()

    async def memory_pressure(self) -> None:
        """The system says at random how short of memory it is, and at last that it is not."""
        path = self.server.directory / "pressure"
        for level in (*self.rng.choices(("NORMAL", "WARNING", "CRITICAL"), k=6), "NORMAL"):
            path.write_text(level)
            await asyncio.sleep(4.0 * self.rng.random())


FAULTS: Final[dict[str, Callable[[Chaos], Awaitable[None]]]] = {
    "flood": Chaos.flood,
    "worker killed": partial(Chaos.lost, sent=signal.SIGKILL, limit_s=ERROR_S_MAX),
    # Left so: the supervisor, or the other ranks, must end it.
    "worker hung": partial(Chaos.lost, sent=signal.SIGSTOP, limit_s=HUNG_S_MAX),
    # For less time than a server takes it for hung after.
    "worker stopped": partial(Chaos.stopped, which="rank", stop_s=3.0),
    # It has a quarter of the time.
    "worker slow": partial(Chaos.stopped, which="worker", stop_s=0.15, times=25),
    # The machine sleeps, for longer than the lease of a request.
    "all stopped": partial(Chaos.stopped, which="all", stop_s=7.0),
    "proxy killed": Chaos.proxy_killed,
    "disk full": Chaos.disk_full,
    "disk slow": Chaos.disk_slow,
    "memory pressure": Chaos.memory_pressure,
}
ERRORS_S_MAX: Final = {"worker killed": ERROR_S_MAX, "worker hung": HUNG_S_MAX}


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# ---------------------------------------------------------------- the subcommand


async def chaos(options: argparse.Namespace) -> dict[str, Any]:
    """Play it; print what was seen as people read it, and return it with the misses.

    Raises:
        ServerError: the server does not start.
    """
    if unknown := set(options.only) - set(FAULTS):
        raise ServerError(f"no such fault: {', '.join(unknown)}; there are: {', '.join(FAULTS)}")
    model = fixture_dir("qwen3", tiny=options.ranks == 1, ranked=options.ranks > 1)
    given = {
        **{"MODEL_PATH": str(model), "RANKS": str(options.ranks)},
        **{"MAX_KV_SIZE_GB": "1", "STALL_SECONDS": str(STALL_SECONDS)},
    }
    async with loaded_server(options.seed, given, "scripts.faults.broken_worker") as (server, load):
        run = Chaos(server, load, random.Random(options.seed))
        memory = await run.run(options.only or list(FAULTS), options.minutes)
    ledger, back = load.ledger, {name: f"{s:.1f}" for name, s in run.recovery_s.items()}
    kinds = sorted({kind for row in ledger.ends.values() for kind in row})
    rows = [
        [name, run.times[name] or "-", *(row[kind] for kind in kinds), back.get(name, "-")]
        for name, row in ledger.ends.items()
    ]
    print(table(["fault, or request", "times", *kinds, "recovery s"], rows))
    for held in memory:
        print(f"{held.role}: {held.rss / MB:.1f} MB, {held.files} files, {held.threads} threads")
    return ledger.told() | {
        "times": run.times,
        "memory": [asdict(held) for held in memory],
        "log": str(server.log),
    }
