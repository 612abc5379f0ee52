"""Writes README's three figures from what a run of `hearth bench` measured, between two marks.

    .venv/bin/python -m hearth.commands.bench.headline --write README.md

A figure is told of all models of the run: from the model on which a server reads least to the one
on which it reads most. Beside Hearth's stands that of the other server that reads least, chosen
for each model anew; servers whose tokens nobody counted, or whose requests failed, are none. A test
fails when README and the results differ.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.commands.bench.results import HEARTH, Results
from hearth.commands.bench.statistics import line

RESULTS: Final = Path("bench/results.json")
BEGIN: Final = "<!-- figures: made by python -m hearth.commands.bench.headline -->\n"
END: Final = "<!-- end of figures -->\n"
LINE_CHARS: Final = 114
_BLANK: Final = "\x00"  # keeps a blank within code from being a line's end
_KINDS: Final = ("dense", "hybrid", "window", "vision")


class NoFigureError(Exception):
    """A figure cannot be told from the results; says why."""


@dataclass(frozen=True, slots=True)
class HeadlineFigure:
    """What is read in some workloads, over the ideal or as a share of the prompts."""

    workloads: tuple[str, ...]
    is_share: bool  # of the prompts; else times the ideal
    text: str  # with {own} and {other}

    @property
    def whole(self) -> str:
        """Return the measure that the tokens read are divided by."""
        return "prompt_tokens" if self.is_share else "ideal_tokens"


# What makes a user of agents wait. Not cancelled prompts: a server that goes on reading for nobody
# reads them once too, and the count of tokens does not tell that others wait meanwhile.
FIGURES: Final = (
    HeadlineFigure(
        ("sub-agents", "forked-agent"),
        False,
        "sessions with sub-agents read {own} what a perfect cache would ({other})",
    ),
    HeadlineFigure(
        ("kill",),
        True,
        "after `kill -9` the last prompt costs {own} of its tokens ({other})",
    ),
    HeadlineFigure(
        ("day",),
        False,
        "ten sessions by turns, in the memory of one, read {own} the ideal ({other})",
    ),
)


def headline(results: Results) -> str:
    """Return the sentence of README.

    Raises:
        NoFigureError: something that a figure needs was not measured.
    """
    told = []
    for figure in FIGURES:
        own = [_value(results, model, HEARTH, figure) for model in results.models]
        if None in own:
            model = list(results.models)[own.index(None)]
            needs = " and ".join(figure.workloads)
            raise NoFigureError(f"{model}: Hearth has no count of {needs} without failures.")
        others = [_best_other(results, model, figure) for model in results.models]
        shown = {
            "own": f"**{_range([each for each in own if each is not None], figure)}**",
            "other": _range([each for each in others if each is not None], figure),
        }
        told.append(figure.text.format(**shown))
    if not told or not results.models:
        raise NoFigureError("The results have no model.")
    sentence = f"{_introduction(results)} {'; '.join(told)}."
    return wrapped(sentence)


def _introduction(results: Results) -> str:
    kinds = [kind for kind in _KINDS if any(m.kind == kind for m in results.models.values())]
    models = _listed(kinds) or "some"
    if results.models and all(model.is_stand_in for model in results.models.values()):
        models += " stand-in"  # a reader must not take them for models of real size
    others = sum(name != HEARTH for name in results.servers)
    beside = f"beside {others} other server{'s' * (others != 1)}"
    return (
        f"[`hearth bench`](docs/measuring.md) counted, with {models} models {beside} "
        f"(in brackets the one that reads least, for each model anew):"
    )


def _value(results: Results, model: str, server: str, figure: HeadlineFigure) -> float | None:
    """Return one figure: the medians of what was read, over those of what it is divided by."""
    read, whole = 0.0, 0.0
    for workload in figure.workloads:
        taken = line(results, model, server, workload, "read_tokens")
        # The ideal is Hearth's for all: nobody else tells which tokens a prompt has.
        asked = HEARTH if figure.whole == "ideal_tokens" else server
        most = line(results, model, asked, workload, figure.whole)
        if taken is None or most is None or taken.failed or taken.is_claimed:
            return None
        read += taken.median
        whole += most.median
    return read / whole if whole else None


def _best_other(results: Results, model: str, figure: HeadlineFigure) -> float | None:
    others = (_value(results, model, name, figure) for name in results.servers if name != HEARTH)
    return min((each for each in others if each is not None), default=None)


def _range(values: Sequence[float], figure: HeadlineFigure) -> str:
    """Return the least and the most, once where they look alike."""
    if not values:
        return "no other was counted"
    unit = " %" if figure.is_share else " times"
    ends = [_percent(each) if figure.is_share else f"{each:.2f}" for each in values]
    least, most = ends[values.index(min(values))], ends[values.index(max(values))]
    return (least if least == most else f"{least} to {most}") + unit


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.1f}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def wrapped(sentence: str) -> str:
    """Return `sentence` in lines that a page of prose may have, code and bold in one piece."""
    parts = sentence.split("`")
    parts[1::2] = [part.replace(" ", _BLANK) for part in parts[1::2]]
    wrapped = textwrap.fill(
        "`".join(parts), LINE_CHARS, break_long_words=False, break_on_hyphens=False
    )
    return wrapped.replace(_BLANK, " ") + "\n"


# ---------------------------------------------------------------- the page


def figures(place: Path = RESULTS) -> str:
    """Return the sentence of the results at `place`; nothing where there are none yet."""
    return headline(Results.load(place)) if place.exists() else ""


def with_figures(page: str, told: str) -> str:
    """Return the text of a page with `told` between its marks.

    Raises:
        NoFigureError: it has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise NoFigureError(f"The page has lost its marks: {BEGIN.strip()} and {END.strip()}.")
    return f"{before}{begin}{told}{end}{behind}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sentence, or write it into a page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args(arguments)
    try:
        told = headline(Results.load(options.results))
        if options.write is None:
            print(told, end="")
        else:
            options.write.write_text(with_figures(options.write.read_text(), told))
    except (NoFigureError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
