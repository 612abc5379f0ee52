"""Turns the figures of `python -m scripts.bench peers` into a Markdown report and plots."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.bench.peers_figures import Figures, Probe
from scripts.bench.peers_servers import HEARTH, PEERS

HEAD: Final = """# Hearth beside other local MLX servers

Written by `python -m scripts.bench peers`; `NOTES.md` beside it is written by hand. One server at
a time, on the same model, machine and captured requests of agents, each with its own
defaults. Random-weight fixtures on the CPU backend: tokens mean what they mean anywhere, seconds
and memory only compare servers here.

- **prefilled** is counted inside each server, where attention is computed, not taken from what it
  says (\u00b1 1 token a request: some read the last token alone). **hit** = 1 - prefilled / prompt.
- **ideal**: tokens in no earlier prompt of the session, by the ids that Hearth built.
- **after cancel**: new prompts are cancelled at 45 % of the time to first token and sent again.
  What is read from the cancel on counts, so a server that goes on reading for nobody is charged
  for it (a chunk that is being read counts as read). **after restart**: the last prompt once more,
  after a clean stop and start. Both: read / prompt, and the time to the first token (p50).
- **live**: the session with each server's own answers in it, all prompts new to it.
- **decode**: by how much longer a longer answer to the same question takes, greedy, no penalty.
- **cold = warm**: answers that are the same as with the cache switched off, of those whose prompt
  was then really read whole.
"""
NONE: Final = "\u2013"
PLOT_INCHES: Final = (9.0, 3.2)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table. Less than `least`, or than `slack` of the other, is no difference."""

    label: str
    value: Callable[[Figures], float | None]
    show: Callable[[float], str]
    is_more_better: bool | None = None  # None: it is told, not compared
    slack: float = 0.0
    least: float = 0.0
    detail: Callable[[Figures], str] = lambda _: ""

    def cell(self, row: Figures) -> str:
        value = self.value(row)
        return NONE if value is None else self.show(value) + self.detail(row)

    def is_behind(self, mine: float, other: float) -> bool:
        """Say whether `mine` is really worse than `other`."""
        if self.is_more_better is None:
            return False
        gap = other - mine if self.is_more_better else mine - other
        return gap > max(self.slack * other, self.least)


def _four(value: float) -> str:
    return f"{value:.4f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _read(probe: Probe | None) -> float | None:
    """Return the share of a probe's prompt that was read."""
    return None if probe is None else probe.prefilled / probe.prompt


def _of(probe: Probe | None) -> str:
    if probe is None:
        return ""
    first = "" if probe.ttft_s is None else f", {_seconds(probe.ttft_s)}"
    return f" ({probe.prefilled:,} / {probe.prompt:,}{first})"


LINES: Final = (
    Line("hit, token-weighted", lambda row: row.hit, _four, True, least=0.005),
    Line("  the ideal", lambda row: row.ideal_hit, _four),
    Line("  as the server says", lambda row: row.claimed_hit, _four),
    Line("prefilled tokens", lambda row: row.prefilled, _whole),
    Line("  over the ideal", lambda row: row.over_ideal, lambda value: f"{value:.3f}x"),
    Line("  a step, p50", lambda row: row.prefilled_p50, _whole),
    Line("first token, p50", lambda row: row.ttft_s(0.5), _seconds, False, 0.1),
    Line("first token, p95", lambda row: row.ttft_s(0.95), _seconds, False, 0.1),
    Line("  p50 with the cache off", lambda row: row.cold_ttft_p50_s, _seconds),
    Line(
        "after cancel, read",
        lambda row: _read(row.after_cancel),
        _percent,
        False,
        least=0.01,
        detail=lambda row: _of(row.after_cancel),
    ),
    Line(
        "after restart, read",
        lambda row: _read(row.after_restart),
        _percent,
        False,
        least=0.01,
        detail=lambda row: _of(row.after_restart),
    ),
    Line(
        "live, hit",
        lambda row: None if row.live is None else row.live.hit,
        _four,
        True,
        least=0.005,
        detail=lambda row: _of(row.live),
    ),
    Line("decode, tokens / s", lambda row: row.decode_tok_s, lambda v: f"{v:.1f}", True, 0.05),
    Line("memory, MB", lambda row: row.memory_mb, _whole, False, 0.05),
    Line(
        "cold = warm",
        lambda row: row.equal_rate,
        _percent,
        True,
        detail=lambda row: f" ({row.equal} of {row.compared})",
    ),
    Line("failed, refused requests", lambda row: row.failed + row.refused, _whole, False),
)


def written(rows: Sequence[Figures], drawn: Sequence[Path] = (), notes: str = "") -> str:
    """Return the report. `drawn` are the plots, named as `plot_name` does; `notes` go in whole."""
    plot_names = {path.name: path for path in drawn}
    parts = [HEAD, "## Where Hearth is behind\n", _bullets(behind(rows))]
    parts += [notes.strip() + "\n"] if notes.strip() else []
    for group in groups(rows):
        first = group[0]
        parts.append(f"## {first.fixture}, {first.trace}, {first.limit} requests\n")
        if (path := plot_names.get(plot_name(first))) is not None:
            about = f"prefilled tokens and seconds to the first token of each step, {first.fixture}"
            parts.append(f"![{about}]({path.parent.name}/{path.name})\n")
        parts += [table(group), _bullets(remarks(group)), commands(group)]
    parts += ["## Servers\n", servers(rows)]
    return "\n".join(parts)


def groups(rows: Iterable[Figures]) -> list[list[Figures]]:
    """Return the rows by model and trace, Hearth first, servers by URL last."""
    rank = {name: number for number, name in enumerate(PEERS)}
    found: dict[tuple[str, str], list[Figures]] = {}
    for row in rows:
        found.setdefault((row.fixture, row.trace), []).append(row)
    return [
        sorted(group, key=lambda row: rank.get(row.side, len(rank))) for group in found.values()
    ]


def table(group: Sequence[Figures]) -> str:
    """Return a line for each measure, a column for each server."""
    lines = [["", *(row.side for row in group)], ["---", *("---:" for _ in group)]]
    lines += [[line.label, *(line.cell(row) for row in group)] for line in LINES]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def behind(rows: Iterable[Figures]) -> list[str]:
    """Name each line on which another server is ahead of Hearth, with both values."""
    found = []
    for group in groups(rows):
        mine = next((row for row in group if row.side == HEARTH), None)
        if mine is None or not mine.steps:
            continue
        for line in LINES:
            own = line.value(mine)
            others = [(row, line.value(row)) for row in group if row is not mine and row.steps]
            ahead = [
                f"{row.side} {line.cell(row)}"
                for row, value in others
                if own is not None and value is not None and line.is_behind(own, value)
            ]
            if ahead:
                where = f"{mine.fixture}, {mine.trace}, {line.label.strip()}"
                found.append(f"{where}: Hearth {line.cell(mine)}; {'; '.join(ahead)}")
    return found or ["On no line."]


def remarks(group: Sequence[Figures]) -> list[str]:
    """Say what a reader must know of each server's column."""
    found = []
    for row in group:
        if not row.steps:
            found.append(f"{row.side} answered nothing here.")
        elif not row.is_metered:
            found.append(f"{row.side} has no meter: its prefilled tokens are what it says.")
        if others := sum(step.prompt != (step.ideal_prompt or step.prompt) for step in row.steps):
            found.append(
                f"{row.side} builds {others} of {len(row.steps)} prompts otherwise than Hearth: "
                f"{row.prompt:,} tokens in all, and the ideal is not quite its own."
            )
        found += [f"{row.side}: {_inline(error)}" for error in row.errors]
    return found


def _inline(text: str) -> str:
    """Return `text` on one line, as code."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def commands(group: Sequence[Figures]) -> str:
    lines = ["| server | its column is made by | at | commit | load |", "|---|---|---|---|---:|"]
    for row in group:
        cells = (row.side, f"`{row.command}`", row.started, row.commit, f"{row.load}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def servers(rows: Iterable[Figures]) -> str:
    """Return what is compared, once each, and the machines they ran on."""
    known = {row.side: row for row in rows}
    lines = ["| server | version | started with |", "|---|---|---|"]
    for name, row in known.items():
        lines.append(f"| {name} | {row.version} | `{row.server_command}` |")
    machines = dict.fromkeys(row.machine for row in known.values())
    return "\n".join(lines) + "\n\nMeasured on " + "; ".join(machines) + ".\n"


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


# ---------------------------------------------------------------- plots


def plot_name(row: Figures) -> str:
    name = "".join(c if c.isalnum() else "-" for c in f"{row.fixture}-{row.trace}")
    return f"{name}.svg"


def plots(rows: Iterable[Figures], directory: Path) -> list[Path]:
    """Draw each model and trace; return the files, none where matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return []
    matplotlib.rcParams["svg.hashsalt"] = "hearth"  # the same figures give the same file
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for group in groups(rows):
        figure = Figure(figsize=PLOT_INCHES, layout="constrained")
        tokens, seconds = figure.subplots(1, 2)
        for row in group:
            turns = range(1, len(row.steps) + 1)
            tokens.plot(turns, [s.prefilled for s in row.steps], marker=".", label=row.side)
            first = [float("nan") if s.ttft_s is None else s.ttft_s for s in row.steps]
            seconds.plot(turns, first, marker=".", label=row.side)
        if ideal := [s.ideal for s in group[0].steps if s.ideal is not None]:
            style = {"color": "black", "linestyle": ":", "label": "ideal"}
            tokens.plot(range(1, len(ideal) + 1), ideal, **style)
        for axes, title in ((tokens, "prefilled tokens"), (seconds, "seconds to first token")):
            axes.set_title(title)
            axes.set_xlabel("request")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        tokens.legend(fontsize="small")
        path = directory / plot_name(group[0])
        figure.savefig(path, metadata={"Date": None})
        drawn.append(path)
    return drawn
