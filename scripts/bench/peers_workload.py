"""Runs one server of the peers benchmark through its steps: cold, warm, and restarted."""

import asyncio
import contextlib
import copy
import re
import secrets
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp

from hearth.commands.replay.ideal_cache import percentile
from hearth.commands.replay.player import Row, replay
from hearth.commands.replay.traces import CHAT_PATH, Captured
from scripts.bench.peers_figures import Figures, Probe, same_answers, steps_of
from scripts.bench.peers_servers import Peer, Running, install, started
from scripts.bench.servers import SideError
from scripts.replay.__main__ import held_to, row_line

CANCEL_SHARE: Final = 0.45  # of the time that a prompt of that length takes to its first token
CANCEL_ROUNDS: Final = 3
RETRY_S: Final = 0.2  # between hanging up and asking again
SHORT_TOKENS: Final = 8
LONG_TOKENS: Final = 136
MORE_TOKENS_MIN: Final = 32  # by which a long answer must be longer for its speed to say anything
DECODE_ROUNDS: Final = 3
ERRORS_TOLD_MAX: Final = 3
ERROR_CHARS_MAX: Final = 200
NAMES_ERROR: Final = re.compile(r"[\w.]*(Error|Exception)\b")

Ids = Sequence[Sequence[int] | None]


class Course:
    """One server on one trace. Each stage starts it once; what fails is told, the rest goes on."""

    def __init__(
        self, peer: Peer, model: Path, captured: Sequence[Captured], tokens_max: int
    ) -> None:
        self._peer = peer
        self._model = model
        self._captured = captured
        self._tokens_max = tokens_max
        self._unit = 0  # what the meter counts for one token; 0 = it has not counted any
        self._warm: list[Row] = []
        self._cold: list[Row] = []
        self._live: list[Row] = []
        self._after_cancel: Probe | None = None
        self._after_restart: Probe | None = None
        self._memory_mb: float | None = None
        self._decode_tok_s: float | None = None
        self._errors: list[str] = []

    async def run(self, directory: Path) -> None:
        """Measure all that this server allows; `directory` is empty and for it alone."""
        stages = {"warm": self._run_warm, "again": self._run_again}
        if not self._peer.url:
            stages["cold"] = self._run_cold
        try:
            install(self._peer)
        except SideError as error:
            self._errors.append(str(error))
            return
        for name, stage in stages.items():
            try:
                await stage(directory)
            except (SideError, aiohttp.ClientError, TimeoutError) as error:
                self._errors.append(f"{name}: {_told(error)}")
                if not self._warm:
                    return

    @property
    def ids(self) -> Ids | None:
        """Return the ids of the prompts of the warm replay; None where the server tells none."""
        told = [row.ids for row in self._warm]
        return told if any(told) else None

    def figures(self, row: Figures, ids: Ids | None) -> Figures:
        """Return `row` with what was found, held to the ideal of `ids`."""
        warm = held_to(self._warm, ids) if ids is not None and self._warm else self._warm
        equal, compared = same_answers(self._warm, self._cold) if self._cold else (0, 0)
        refused = sum(each.outcome.is_refused for each in warm)
        steps = steps_of(warm)
        cold_s = [each.outcome.ttft_s for each in self._cold if each.outcome.ttft_s is not None]
        return replace(
            row,
            steps=steps,
            refused=refused,
            failed=len(warm) - len(steps) - refused,
            is_metered=self._unit > 0,
            live=_sum(self._live),
            after_cancel=self._after_cancel,
            after_restart=self._after_restart,
            cold_ttft_p50_s=percentile(cold_s, 0.5),
            decode_tok_s=self._decode_tok_s,
            memory_mb=self._memory_mb,
            compared=compared,
            equal=equal,
            errors=tuple(self._errors + _errors_of(warm)),
        )

    # ------------------------------------------------------------ stages

    async def _run_warm(self, directory: Path) -> None:
        """Replay the trace on a fresh server; what it keeps on disk, it keeps in `directory`."""
        async with self._started(directory / "warm") as running:
            self._warm = await self._play(self._captured, running)
            self._memory_mb = running.memory_mb()

    async def _run_again(self, directory: Path) -> None:
        """Start it where it ended: what it has kept, what a cancel leaves, the session live."""
        last = self._captured[-1]
        async with self._started(directory / "warm") as running:
            if not self._peer.url:
                self._after_restart = await self._probe(last, running)
            self._after_cancel = await self._run_cancels(last, running)
            self._live = await self._play(salted(self._captured), running, is_live=True)
            # Last: its questions would push the session out of a small cache.
            self._decode_tok_s = await decode_speed(running)

    async def _run_cancels(self, captured: Captured, running: Running) -> Probe | None:
        """Return what new prompts cost that are cancelled and sent again, all together.

        One tells little: how much of a chunk was read when the client hung up is chance.
        """
        whole = await self._probe(salted([captured])[0], running)
        if whole is None or whole.ttft_s is None:
            return None
        rows: list[Row] = []
        for (cut,) in (salted([captured]) for _ in range(CANCEL_ROUNDS)):
            units = await cancelled(cut, running, whole.ttft_s * CANCEL_SHARE)
            rows += await self._play([cut], running, since=units)
        self._errors += _errors_of(rows)
        return _sum(rows)

    async def _run_cold(self, directory: Path) -> None:
        """Replay with the cache switched off: the answers that a cache must not change."""
        async with self._started(directory / "cold", is_cold=True) as running:
            self._cold = await self._play(self._captured, running)

    def _started(
        self, directory: Path, *, is_cold: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Running]:
        return started(self._peer, self._model, directory, self._tokens_max, is_cold)

    # ------------------------------------------------------------ one after another

    async def _play(
        self,
        rows: Sequence[Captured],
        running: Running,
        *,
        is_live: bool = False,
        since: int | None = None,
    ) -> list[Row]:
        """Send `rows`; return how each went, with what was really read for it where metered.

        Where requests overlap, what is read is put down to the one that ends next. What was read
        after the meter stood at `since` (default: at what it stands) is the first one's.
        """
        counted: dict[int, int] = {}
        before = running.read_units() if since is None else since

        def tell(row: Row) -> None:
            nonlocal before
            now = running.read_units()
            counted[row.number], before = now - before, now
            print(row_line(row), f"({counted[row.number]:,} units)", file=sys.stderr)

        done, _ = await replay(rows, replace(running.target, is_live=is_live), tell)
        if not self._unit:
            self._unit = unit_of(done, counted)
        return [metered(row, counted[row.number], self._unit) for row in done]

    async def _probe(self, captured: Captured, running: Running) -> Probe | None:
        """Send one request; return what it cost, None where it was not answered."""
        rows = await self._play([captured], running)
        self._errors += _errors_of(rows)
        return _sum(rows)


def unit_of(rows: Sequence[Row], counted: dict[int, int]) -> int:
    """Return what the meter counts for one token, by the first answer of a fresh server.

    That one is read whole, but for a token or so that is read alone.
    """
    for row in rows:
        if row.tokens is not None and row.tokens.prompt:
            return round(counted[row.number] / row.tokens.prompt)
    return 0


def metered(row: Row, units: int, unit: int) -> Row:
    """Return `row` with the tokens that were really read for it; as it is without a meter."""
    outcome = row.outcome
    if not unit or outcome.tokens is None:
        return row
    tokens = replace(outcome.tokens, prefilled=round(units / unit))
    return replace(row, outcome=replace(outcome, tokens=tokens))


async def cancelled(captured: Captured, running: Running, after_s: float) -> int:
    """Send a request, hang up `after_s` later, wait RETRY_S; return the meter at the hanging up.

    A server that goes on reading for nobody is charged for it.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            await replay([captured], running.target)
    units = running.read_units()
    await asyncio.sleep(RETRY_S)
    return units


async def decode_speed(running: Running) -> float | None:
    """Return tokens a second, the median of some rounds.

    One question is asked for a short and for a long answer: what differs is decoding alone,
    however late a server sends its first text.
    """
    said = [{"role": "user", "content": "Count as far as you can."}]
    body = {"messages": said, "repetition_penalty": 1.0}  # servers differ in its default
    question = Captured("decode", "chat", CHAT_PATH, {}, body, "", 0.0, 0.0)
    speeds = []
    for _ in range(DECODE_ROUNDS):
        (asked,) = salted([question])
        rows = []
        for tokens_max in (SHORT_TOKENS, SHORT_TOKENS, LONG_TOKENS):  # the first one reads it
            rows += (await replay([asked], replace(running.target, tokens_max=tokens_max)))[0]
        speeds += [speed for speed in (speed_of(*rows[1:]),) if speed is not None]
    return statistics.median(speeds) if speeds else None


def speed_of(short: Row, long: Row) -> float | None:
    """Return tokens a second by two answers to one question; None where they say nothing."""
    if short.tokens is None or long.tokens is None:
        return None
    more = long.tokens.completion - short.tokens.completion
    spent_s = long.outcome.total_s - short.outcome.total_s
    return more / spent_s if more >= MORE_TOKENS_MIN and spent_s > 0 else None


def salted(rows: Sequence[Captured]) -> list[Captured]:
    """Return the session as one that no server has seen: new words at the front of its prompts.

    Both in the first message and in the first tool: templates differ in which comes first.
    """
    salt = f"Session {secrets.token_hex(8)}. "
    return [replace(row, body=_salted_body(row.dialect, row.body, salt)) for row in rows]


def _salted_body(dialect: str, body: dict[str, Any], salt: str) -> dict[str, Any]:
    body = copy.deepcopy(body)
    name = {"messages": "system", "responses": "instructions"}.get(dialect, "")
    turns = body["messages" if "messages" in body else "input"]
    holder, key = (body, name) if body.get(name) else (turns[0], "content")
    content = holder[key]
    if isinstance(content, str):
        holder[key] = salt + content
    else:
        kind = "input_text" if dialect == "responses" else "text"
        holder[key] = [{"type": kind, "text": salt}, *content]
    for tool in (body.get("tools") or ())[:1]:
        told = tool.get("function", tool)
        told["description"] = salt + (told.get("description") or "")
    return body


def _sum(rows: Sequence[Row]) -> Probe | None:
    steps = steps_of(rows)
    if not steps:
        return None
    ideals = [step.ideal for step in steps if step.ideal is not None]
    return Probe(
        prompt=sum(step.prompt for step in steps),
        prefilled=sum(step.prefilled for step in steps),
        ttft_s=percentile([step.ttft_s for step in steps if step.ttft_s is not None], 0.5),
        ideal=sum(ideals) if len(ideals) == len(steps) else None,
    )


def _errors_of(rows: Sequence[Row]) -> list[str]:
    found = [row.outcome.error[:ERROR_CHARS_MAX] for row in rows if row.outcome.error]
    return list(dict.fromkeys(found))[:ERRORS_TOLD_MAX]


def _told(error: BaseException) -> str:
    """Return the line of a server's last words that names an error, else the last of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if NAMES_ERROR.match(line)]
    last = (named or lines or [""])[-1]
    return f"{type(error).__name__} {last}"[:ERROR_CHARS_MAX]
