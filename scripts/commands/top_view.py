"""Draws what `hearth top` shows: takes figures, returns rich's renderables, asks no server.

Fits 80 columns. No meaning is in a colour alone. Names come from clients: nothing in them reaches
the terminal as a control character or as markup.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hearth.commands.inspect_cache import MUST_BE_ZERO
from hearth.commands.server_client import Row, counts_of, plain_name

FULL_SHARE: Final = 0.8  # of the budget: from here on something is about to go
FIGURE_MAX: Final = 2**63  # what is more, or is no number, would overflow or mean nothing
SESSIONS_LIVE: Final = 4
REQUESTS_MIN: Final = 3
WAITED_S_MIN: Final = 1.0  # for a slot: less is not worth a word
WHOLE: Final = ("stop", "length", "tool_calls", "prefilled")  # ends that need no word
DATES_MAX_S: Final = 2**35  # seconds since the epoch that every system can tell as a date
SPEED_TOKENS_MIN: Final = 16  # as in /metrics: the speed of fewer says nothing
WIDTH_MIN: Final = 76  # columns that all figures need beside names and causes
WIDTH_MAX: Final = 140  # columns: further apart, a row is hard to follow
_GOOD: Final = frozenset(("ok", "ready", "unloaded"))
_BAD: Final = frozenset(("dead", "unreachable"))
_MB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a server told last: the bodies of /health, /v1/cache and /v1/sessions."""

    url: str
    health: Row = field(default_factory=dict)
    cache: Row = field(default_factory=dict)
    sessions: Row = field(default_factory=dict)
    problem: str = ""  # why some of it is not of now
    age_s: float = 0.0  # of what is oldest in it


@dataclass(frozen=True, slots=True)
class Limits:
    """How many rows of what there may be many of are shown."""

    requests: int = 10
    sessions: int = 10
    is_narrow: bool = False  # names and causes get the room of what is missed least


def view(snapshot: Snapshot, limits: Limits) -> Group:
    """Return all that is shown, the most urgent first."""
    workers = rows_of(snapshot.cache, "workers")
    parts: list[RenderableType] = [
        worker_table(rows_of(snapshot.health, "workers"), workers, limits.is_narrow),
        *warnings(workers),
    ]
    if prefills := rows_of(snapshot.health, "prefills"):
        parts += [Text(), prefill_table(prefills)]
    parts += [Text(), cache_table(workers), totals(snapshot.cache), *cloud_lines(snapshot.cache)]
    parts += vision_lines(workers)
    parts += speculation_lines(workers)
    if drafts := draft_rows(workers):
        parts += [Text(), draft_table(drafts)]
    sessions = rows_of(snapshot.sessions, "sessions")
    if recent := rows_of(snapshot.sessions, "recent"):
        names = session_names(sessions)
        parts += [Text(), request_table(recent[: limits.requests], names, limits.is_narrow)]
    if sessions:
        parts += [Text(), session_table(sessions[: limits.sessions])]
        if (rest := len(sessions) - limits.sessions) > 0:
            parts.append(Text(f"and {rest:,} sessions more"))
    return Group(title(snapshot), Constrain(Group(*parts), WIDTH_MAX))


def limits_in(height: int, snapshot: Snapshot, width: int = WIDTH_MIN) -> Limits:
    """Return what fits into a terminal of that size, in lines and columns."""
    workers, kept = (rows_of(row, "workers") for row in (snapshot.health, snapshot.cache))
    prefills = len(rows_of(snapshot.health, "prefills"))
    drafts = len(draft_rows(kept))
    told = len(workers) + len(kept) + len(warnings(kept)) + len(vision_lines(kept))
    told += len(cloud_lines(snapshot.cache))
    told += len(speculation_lines(kept)) + (drafts + 2 if drafts else 0)
    used = 10 + told + (prefills + 2 if prefills else 0) + SESSIONS_LIVE + 3
    return Limits(max(REQUESTS_MIN, height - used), SESSIONS_LIVE, width < WIDTH_MIN)


# ---------------------------------------------------------------- the parts


def title(snapshot: Snapshot) -> Text:
    status = word(snapshot.health, "status")
    queue = len(rows_of(snapshot.health, "queue"))
    line = Text.assemble(
        ("hearth ", "bold"),
        f"{word(snapshot.health, 'version')}  {plain_name(snapshot.url)}  ",
        (status, tone(status)),
        f"  {queue} in the queue",
    )
    if snapshot.problem:
        old = f" These figures are {seconds(snapshot.age_s)} old." if snapshot.health else ""
        line.append(f"\n{plain_name(snapshot.problem)}{old}", "bold red")
    return line


def worker_table(workers: Sequence[Row], kept: Sequence[Row], is_narrow: bool) -> Table:
    """Return a row for each worker, with what its model and all KV take of its memory limit."""
    limits = {str(row.get("worker")): row for row in kept}
    made = columns("<worker:6", "<state:11", "<model", ">run:3", ">queue:5", ">wait:6")
    more(made, *(() if is_narrow else (">restarts:8", ">MB:7", ">of MB:7")))
    for row in workers:
        state = word(row, "state")
        limit = figure(limits.get(str(row.get("id")), {}), "memory_limit_bytes")
        used = f"{figure(row, 'active_bytes') // _MB:,}"
        memories = (used, f"{limit // _MB:,}" if limit else "-")
        made.add_row(
            cell(row, "id"),
            Text(state, tone(state)),
            cell(row, "model"),
            *(count(row, name) for name in ("running", "waiting")),
            seconds(number(row, "wait_s")),
            *(() if is_narrow else (count(row, "restarts"), *memories)),
        )
    return made


def warnings(workers: Sequence[Row]) -> list[RenderableType]:
    """Return what a worker cannot tell, and each counter that must stay 0 and did not."""
    lines: list[RenderableType] = []
    for row in workers:
        name = f"worker {word(row, 'worker')}"
        if "error" in row:
            lines.append(Text(f"{name}: {word(row, 'error')}", "yellow"))
        counts = counts_in(row)
        for counter in MUST_BE_ZERO:
            if figure(counts, counter):
                text = f"{name}: {counter} is {figure(counts, counter):,}; please report it"
                lines.append(Text(text, "bold red"))
    return lines


def prefill_table(prefills: Sequence[Row]) -> Table:
    made = columns("<prefilling:24", "<", ">tokens:10", ">of:10", ">%:3", ">age:6")
    for row in prefills:
        done, prompt = figure(row, "done_tokens"), figure(row, "prompt_tokens")
        figures = (bar(done, prompt, None), f"{done:,}", f"{prompt:,}", percent(done, prompt))
        name = cell(row, "title") if row.get("title") else cell(row, "request_id")
        made.add_row(name, *figures, seconds(number(row, "age_s")))
    return made


def cache_table(workers: Sequence[Row]) -> Table:
    made = columns("<worker:6", ">kept MB:9", ">of MB:9", "<:10", ">%:4")
    more(made, ">slots:5", ">slots MB:8", ">disk MB:9", ">evicted:7", "<")
    for row in workers:
        used, room = figure(row, "bytes"), figure(row, "budget_bytes")
        slots = f"{len(rows_of(row, 'slots'))}/{figure(row, 'slots_max')}"
        made.add_row(
            cell(row, "worker"),
            *(memory(row, name) for name in ("bytes", "budget_bytes")),
            bar(used, room, 10),
            percent(used, room),
            slots if "slots" in row else "-",
            memory(row, "slots_bytes"),
            memory(inner(row, "disk"), "bytes_used"),
            count(row, "evictions") if "evictions" in row else "-",
        )
    return made


def totals(cache: Row) -> Text:
    """Return the hit rate of all requests since the server started, and what workers lost."""
    names = ("requests", "prompt_tokens", "cached_tokens", "prefilled_tokens")
    requests, prompt, cached, read = (figure(inner(cache, "totals"), name) for name in names)
    workers = rows_of(cache, "workers")
    lost = sum(figure(counts_in(row), "lost_tokens") for row in workers)
    rate = f"{100 * cached / prompt:.1f} %" if prompt else "-"
    return Text(
        f"hit rate {rate} of {prompt:,} tokens in {requests:,} requests\n"
        f"tokens   {cached:,} saved, {read:,} prefilled, {lost:,} lost\n"
        f"tokens/s {speeds(inner(cache, 'totals'), workers)}"
    )


def speeds(sums: Row, workers: Sequence[Row]) -> str:
    """Return how fast answers are written, now and in the middle, and prompts are read."""
    now = sum(number(row, "answers_tokens_per_s") for row in workers)
    running = sum(figure(row, "answers_running") for row in workers)
    told = [f"{now:,.0f} decoded now, {running:,} answers"] if now else []
    names = {"decode_speed": "decoded by an answer", "speed": "prefilled"}
    told += [f"{number(sums, name):,.0f} {word}" for name, word in names.items() if sums.get(name)]
    return ", ".join(told) or "-"


def cloud_lines(cache: Row) -> list[RenderableType]:
    """Return what others answered, which is in none of the figures above it."""
    told = inner(inner(cache, "totals"), "cloud")
    if not figure(told, "requests"):
        return []
    read, kept, written = (
        count(told, f"{name}_tokens") for name in ("prompt", "cached", "completion")
    )
    text = f"elsewhere {count(told, 'requests')} requests: {read} tokens read ({kept} cached), "
    return [Text(f"{text}{written} written, ${number(told, 'cost'):,.4f}")]


def vision_lines(workers: Iterable[Row]) -> list[RenderableType]:
    told = [(word(row, "worker"), inner(row, "vision")) for row in workers]
    return [
        Text(
            f"worker {worker} vision  {count(row, 'encoder_calls')} images encoded in "
            f"{seconds(number(row, 'encoder_s'))}, {count(row, 'failures')} failed, "
            f"{memory(row, 'bytes')} MB kept"
        )
        for worker, row in told
        if row
    ]


def speculation_lines(workers: Iterable[Row]) -> list[RenderableType]:
    """Return whether each worker drafts, and what it gains by that or why it does not."""
    lines: list[RenderableType] = []
    for row in workers:
        if told := inner(row, "speculation"):
            text = f"worker {word(row, 'worker')} drafts  {speculation_text(told)}"
            lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
    return lines


def speculation_text(told: Row) -> str:
    text = f"{word(told, 'state')} ({word(told, 'mode')})"
    if word(told, "state") != "on":
        return f"{text}: {word(told, 'reason')}" if told.get("reason") else text
    if tokens := figure(told, "tokens"):
        text += f", {figure(told, 'forwards') / tokens:.2f} forwards a token"
    gain = number(told, "speedup_estimate")
    return f"{text}, about {gain:.2f} times as fast" if gain else text


def draft_rows(workers: Iterable[Row]) -> list[tuple[str, str, int, int]]:
    """Return what each worker drafted from each source: worker, source, drafted, accepted."""
    rows = []
    for row in workers:
        sources = inner(inner(row, "speculation"), "by_source")
        for source in sources:
            counts = inner(sources, source)
            if drafted := figure(counts, "drafted"):
                names = (word(row, "worker"), plain_name(source))
                rows.append((*names, drafted, figure(counts, "accepted")))
    return rows


def draft_table(rows: Sequence[tuple[str, str, int, int]]) -> Table:
    made = columns("<worker:6", "<drafts from:12", ">drafted:12", ">accepted:12", ">%:3", "<")
    for worker, source, drafted, accepted in rows:
        shares = (f"{drafted:,}", f"{accepted:,}", percent(accepted, drafted))
        made.add_row(Text(worker), Text(source), *shares)
    return made


def session_names(sessions: Iterable[Row]) -> dict[str, str]:
    """Return the first words that were asked in each session, by its id."""
    return {word(row, "session"): word(row, "title") for row in sessions if row.get("title")}


def request_table(recent: Sequence[Row], names: Mapping[str, str], is_narrow: bool) -> Table:
    """Return a row for each request; `names` are what sessions are called, by their ids."""
    made = columns(*(() if is_narrow else ("<time:8",)), "<session:*2", ">prompt:7", ">cached:7")
    more(made, ">prefill:7", "<source:6", ">first:6")
    more(made, *(() if is_narrow else (">tok/s:5",)), "<lost or waited:*3")
    for row in recent:
        name = names.get(word(row, "session")) or word(row, "session") or "anonymous"
        at = time.strftime("%H:%M:%S", time.localtime(number(row, "at") % DATES_MAX_S))
        made.add_row(
            *(() if is_narrow else (at,)),
            Text(name),
            *(count(row, name) for name in ("prompt", "cached", "prefilled")),
            Text("cloud") if row.get("cloud") is True else cell(row, "source"),
            seconds(number(row, "ttft_ms") / 1000),
            *(() if is_narrow else (speed(row),)),
            note(row),
        )
    return made


def session_table(sessions: Sequence[Row]) -> Table:
    """Return a row for each session: its agent, its first words or else its id, its client."""
    made = columns("<session", "<client:16", ">turns:5", ">tok/s:5", ">lost:6", ">idle:6")
    for row in sessions:
        name = word(row, "title") if row.get("title") else word(row, "session")
        if row.get("agent"):
            name = f"{word(row, 'agent')}: {name}"
        client = word(row, "client") if row.get("client") else "-"
        speed_now = f"{number(row, 'decode_speed'):.0f}" if row.get("decode_speed") else "-"
        figures = (count(row, "turns"), speed_now, count(row, "lost"))
        idle = seconds(number(row, "idle_s"))
        made.add_row(Text(name), Text(client), *figures, idle)
    return made


def speed(row: Row) -> str:
    """Return the tokens a second after a request's first; "-" of too few to tell."""
    taken_s = (figure(row, "finish_ms") - figure(row, "ttft_ms")) / 1000
    tokens = figure(row, "completion") - 1
    return f"{tokens / taken_s:.0f}" if tokens >= SPEED_TOKENS_MIN and taken_s > 0 else "-"


def note(row: Row) -> Text:
    """Return what a request lost against its own line and why, or else how long it waited.

    Of one that went elsewhere, or came from there, who answered.
    """
    if row.get("cloud") is True or row.get("fallback"):
        ended = "" if word(row, "ended") in (*WHOLE, "answered") else f" {word(row, 'ended')}"
        after = f" after {word(row, 'fallback')}" if row.get("fallback") else ""
        return Text(f"{word(row, 'served_by')}{after}{ended}")
    told = inner(row, "divergence")
    if told:
        return Text(f"{figure(told, 'lost'):,} {word(told, 'cause')}", "yellow")
    if (ended := word(row, "ended")) not in WHOLE:
        return Text(ended)
    waited_s = number(row, "queue_ms") / 1000
    return Text(f"waited {seconds(waited_s)}" if waited_s >= WAITED_S_MIN else "")


# ---------------------------------------------------------------- cells


def columns(*named: str) -> Table:
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style="dim")
    more(made, *named)
    return made


def more(made: Table, *named: str) -> None:
    """Add columns, `<` to the left, `>` to the right: `name:8` is 8 wide, `name:*2` has two parts
    of what is left, `name` one.

    What does not fit ends in "…", never wrapped: a row is a line.
    """
    for each in named:
        name, _, size = each[1:].partition(":")
        is_fixed = size.isdigit()
        made.add_column(
            name,
            justify="left" if each[0] == "<" else "right",
            width=int(size) if is_fixed else None,
            ratio=None if is_fixed else int(size.removeprefix("*") or 1),
            no_wrap=True,
            overflow="ellipsis",
        )


def bar(part: float, whole: float, width: int | None) -> ProgressBar:
    """Return how much of `whole` is used, yellow from FULL_SHARE on; None = as wide as can be."""
    style = "yellow" if part > FULL_SHARE * whole else "green"
    shown = min(part, whole) if whole > 0 else 0
    return ProgressBar(
        total=max(whole, 1),
        completed=shown,
        width=width,
        complete_style=style,
        finished_style=style,
    )


def percent(part: int, whole: int) -> str:
    return f"{100 * part // whole}" if whole > 0 else "-"


def seconds(amount: float) -> str:
    """Return a time in six characters at most: 84 ms, 12.3 s, 4 min, 31 h."""
    if 0 < amount < 1:
        return f"{amount * 1000:.0f} ms"
    if amount < 100:
        return f"{max(amount, 0):.1f} s"
    return f"{amount / 60:.0f} min" if amount < 6000 else f"{min(amount / 3600, 9999):.0f} h"


def tone(state: str) -> str:
    return "green" if state in _GOOD else "bold red" if state in _BAD else "yellow"


def word(row: Row, name: str) -> str:
    value = row.get(name)
    return "-" if value is None else plain_name(str(value))


def cell(row: Row, name: str) -> Text:
    """Return a word as it is: a string in a table would be read as markup."""
    return Text(word(row, name))


def count(row: Row, name: str) -> str:
    return f"{figure(row, name):,}"


def memory(row: Row, name: str) -> str:
    return f"{figure(row, name) / _MB:,.1f}" if name in row else "-"


def figure(row: Row, name: str) -> int:
    """Return a whole number of `row`; 0 where it has none that a server could count."""
    value = row.get(name)
    return value if type(value) is int and abs(value) <= FIGURE_MAX else 0


def number(row: Row, name: str) -> float:
    """Return a number of `row`; 0 where it has none, or none that can be reckoned with."""
    value = row.get(name)
    if isinstance(value, int | float) and abs(value) <= FIGURE_MAX:  # which NaN is not
        return float(value)
    return 0.0


def inner(row: Row, name: str) -> Row:
    value: Any = row.get(name)
    return value if isinstance(value, dict) else {}


def rows_of(row: Row, name: str) -> list[Row]:
    value: Any = row.get(name)
    rows = value if isinstance(value, list) else []
    return [each for each in rows if isinstance(each, dict)]


def counts_in(worker: Row) -> Row:
    return counts_of({name: inner(worker, name) for name in ("counts", "sessions")})
