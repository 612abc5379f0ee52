#!/usr/bin/env python
"""Replays captured agent sessions for a long time against its own server, and watches its memory.

    python -m scripts.soak [TRACE...] [--minutes N] [--clients 3] [--seed S] [--json FILE]
    python -m scripts.soak --requests 10000 [--clients 16] [--seed S]

Each client replays one session after the other, with pauses, and sends back what this server said.
Texts are cut to a length that is drawn for each session, so that they fit a small model and no two
sessions are the same. RSS of each process and the KV in RAM and on disk are sampled.
Memory is held to its level after the first third, which is the warm-up: the median of a tenth of
the run after it, against that of the last tenth. Small budgets make eviction part of it.
Exit status: 0 RSS grew by 2 % at most, KV never was above its budget and no request failed; 1 not
so; 2 the server does not start.
With --requests it sends short requests of every kind instead, and holds memory, open files and
threads of each process to their level over the second half: 1 %, 2 and 5
(scripts/soak_requests.py).
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from hearth.commands.replay.player import Row, Target, replay
from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import TRACES_DIR, Captured, load_trace
from hearth.commands.server_client import table
from scripts.chaos.draft_tally import DraftTally, drafts_line
from scripts.chaos.own_server import MB, OwnServer, ServerError, rss_bytes
from scripts.soak_requests import soak as soak_requests

CHARS: Final = (100, 400)  # of a text of a session
REQUESTS: Final = (4, 16)  # of a session
ANSWER_TOKENS: Final = 16
PAUSE_S_MAX: Final = 2.0  # between two sessions of a client
RAM_BUDGET_MB: Final = 32
WARM_SHARE: Final = 1 / 3
WINDOW_SHARE: Final = 0.1
GROWTH_MAX: Final = 0.02
ERRORS_TOLD_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server held at a moment, in bytes."""

    at_s: float
    rss: dict[str, int]  # by process
    kv: int  # in RAM, of all workers
    kv_budget: int
    slots: int  # live caches, which have no budget but their number
    disk: int
    disk_budget: int
    queued: int  # waits to be written, beside the budget
    active: int  # arrays that MLX holds, all of these and the weights included


@dataclass(slots=True)
class Soak:
    """One run. Owner: the event loop."""

    server: OwnServer
    sessions: Sequence[Sequence[Captured]]
    rng: random.Random
    sample_s: float
    samples: list[Sample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    drafts: DraftTally = field(default_factory=DraftTally)

    async def run(self, whole_s: float, clients: int) -> None:
        end = time.monotonic() + whole_s
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(end))
            for _ in range(clients):
                group.create_task(self._be_client(end))

    async def _be_client(self, end: float) -> None:
        target = Target(
            f"http://127.0.0.1:{self.server.port}", tokens_max=ANSWER_TOKENS, is_live=True
        )
        while time.monotonic() < end:
            rows = shortened(self.rng.choice(self.sessions), self.rng.randrange(*CHARS))
            await replay(rows[: self.rng.randrange(*REQUESTS)], target, self._tell)
            self.counts["sessions"] += 1
            await asyncio.sleep(self.rng.random() * PAUSE_S_MAX)

    def _tell(self, row: Row) -> None:
        outcome = row.outcome
        kind = "answered" if outcome.is_answered else "refused" if outcome.is_refused else "failed"
        self.counts[kind] += 1
        if outcome.tokens is not None:
            self.counts["prompt tokens"] += outcome.tokens.prompt
            self.counts["cached tokens"] += outcome.tokens.cached
        if kind != "answered" and len(self.errors) < ERRORS_TOLD_MAX:
            self.errors.append(f"{row.trace} {row.number}: {outcome.error}")

    async def _watch(self, end: float) -> None:
        began = time.monotonic()
        while (now := time.monotonic()) < end:
            rows = (await self.server.cache()).get("workers", [])
            self.drafts.take(rows)
            if rows and not any("error" in row for row in rows):
                arrays = sum(row["memory_bytes"] - row["beside_arrays_bytes"] for row in rows)
                self.samples.append(self._sample(now - began, rows, arrays))
            else:
                self.counts["samples missed"] += 1
            await asyncio.sleep(max(0.0, now + self.sample_s - time.monotonic()))

    def _sample(self, at_s: float, rows: Sequence[dict[str, Any]], active: int) -> Sample:
        family = self.server.look()
        names = ["proxy", *(f"worker {process.pid}" for process in family[1:])]
        disks = [row["disk"] for row in rows if row["disk"]]
        return Sample(
            at_s,
            {name: rss_bytes(each) for name, each in zip(names, family, strict=True)},
            max(row["bytes"] for row in rows),
            rows[0]["budget_bytes"],
            sum(row["slots_bytes"] for row in rows),
            max((disk["directory_bytes_used"] or 0 for disk in disks), default=0),
            max((disk["bytes_max"] for disk in disks), default=0),
            sum(disk["queue_bytes"] for disk in disks),
            active,
        )


# ---------------------------------------------------------------- reckoning


@dataclass(frozen=True, slots=True)
class Growth:
    """What a process held after the warm-up and at the end, in bytes."""

    process: str
    warm: int
    last: int
    peak: int

    @property
    def share(self) -> float:
        return self.last / self.warm - 1


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Return the growth of each process that was there in every sample.

    Raises:
        ValueError: there are too few samples to tell.
    """
    window = max(1, round(len(samples) * WINDOW_SHARE))
    first = round(len(samples) * WARM_SHARE)
    if len(samples) < first + 2 * window:
        raise ValueError(f"{len(samples)} samples are too few")
    found = []
    for name in samples[0].rss:
        held = [sample.rss[name] for sample in samples if name in sample.rss]
        if len(held) == len(samples):
            warm = statistics.median(held[first : first + window])
            last = statistics.median(held[-window:])
            found.append(Growth(name, int(warm), int(last), max(held)))
    return found


def misses(samples: Sequence[Sample], counts: Counter[str]) -> list[str]:
    """Return what does not hold, as text."""
    found = [
        f"{growth.process} grew by {growth.share:.1%} after the warm-up"
        for growth in growths(samples)
        if growth.share > GROWTH_MAX
    ]
    if any(sample.rss.keys() != samples[0].rss.keys() for sample in samples):
        found.append("a process ended in between")
    for sample in samples:
        if sample.kv > sample.kv_budget:
            found.append(f"KV {sample.kv:,} above {sample.kv_budget:,} at {sample.at_s:.0f} s")
        if sample.disk > sample.disk_budget:
            found.append(f"disk {sample.disk:,} above {sample.disk_budget:,}")
    if counts["failed"] or counts["samples missed"]:
        found.append(f"{counts['failed']} requests failed, {counts['samples missed']} samples")
    if not counts["answered"]:
        found.append("no request was answered")
    return found


def lines(samples: Sequence[Sample], counts: Counter[str]) -> list[str]:
    """Return what was seen, as people read it."""
    rows = [
        [
            growth.process,
            *(f"{value / MB:.1f}" for value in (growth.warm, growth.last, growth.peak)),
            f"{growth.share:+.1%}",
        ]
        for growth in growths(samples)
    ]
    told = [table(["process", "MB warm", "MB last", "MB peak", "growth"], rows), ""]
    kv = max(sample.kv for sample in samples)
    disk = max(sample.disk for sample in samples)
    last = samples[-1]
    told.append(f"KV at most {kv / MB:.1f} MB of {last.kv_budget / MB:.1f} MB in RAM, ")
    told[-1] += f"{disk / MB:.1f} MB of {last.disk_budget / MB:,.0f} MB on disk; "
    told[-1] += f"live caches {max(sample.slots for sample in samples) / MB:.1f} MB, "
    told[-1] += f"waiting for the disk {max(sample.queued for sample in samples) / MB:.1f} MB, "
    told[-1] += f"all of MLX {max(sample.active for sample in samples) / MB:.1f} MB"
    return [*told, ", ".join(f"{count:,} {name}" for name, count in counts.items())]


# ---------------------------------------------------------------- command line


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests", type=int, help="short ones, instead of sessions")
    parser.add_argument("--clients", type=int, help="at once: 3 sessions, or 16 requests")
    parser.add_argument("--sample", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    options.clients = options.clients or (16 if options.requests else 3)
    options.traces = options.traces or sorted(TRACES_DIR.glob("*.jsonl.xz"))
    if not options.traces:
        parser.error(f"there is no trace in {TRACES_DIR}; name some")
    return options


async def soak(options: argparse.Namespace) -> int:
    sessions = [load_trace(path) for path in options.traces]
    settings = {"CACHE_RAM_BUDGET_MB": str(RAM_BUDGET_MB), "MAX_KV_SIZE_GB": "1"}
    server = OwnServer(settings)
    run = Soak(server, sessions, random.Random(options.seed), options.sample)
    found: list[str] = ["it was broken off"]
    try:
        await server.started()
        await run.run(options.minutes * 60, options.clients)
        found = misses(run.samples, run.counts)
    except (ServerError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        server.close(keeps=bool(found))
    told = [*lines(run.samples, run.counts), drafts_line(run.drafts.total), *run.errors]
    print(*told, sep="\n")
    print("verdict: " + ("MISSED: " + "; ".join(found[:ERRORS_TOLD_MAX]) if found else "it held"))
    if options.json:
        report = {
            "counts": dict(run.counts),
            "drafts": dict(run.drafts.total),
            "misses": found,
            "growth": {growth.process: growth.share for growth in growths(run.samples)},
            "samples": [asdict(sample) for sample in run.samples],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    given = options_of()
    if given.requests:
        sys.exit(asyncio.run(soak_requests(given.requests, given.clients, given.seed)))
    sys.exit(asyncio.run(soak(given)))
