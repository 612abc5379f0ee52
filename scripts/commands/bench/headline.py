"""Tells README's line of figures from what a run of `hearth bench` measured.

    .venv/bin/python -m hearth.commands.bench.headline

A figure is told of all models of the run: from the model on which a server reads least to the one
on which it reads most. Beside Hearth's stands that of the other server that reads least, chosen
for each model anew; one whose tokens nobody counted, or whose requests failed, is none. A test
fails when README has another line.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hearth.commands.bench.results import HEARTH, Results
from hearth.commands.bench.statistics import read_over

RESULTS: Final = Path("bench/results.json")
LINE_CHARS: Final = 114
_COUNTS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# What makes a user of agents wait. Not cancelled prompts: a server that goes on reading for nobody
# reads them once too, and the count of tokens does not tell that others wait meanwhile.
SUB_AGENTS: Final = ("sub-agents", "forked-agent")
KILLED: Final = ("kill",)


def headline(results: Results) -> str:
    """Return the sentences of README, in lines.

    Raises:
        ValueError: something that a figure needs was not measured.
    """
    others = [name for name in results.servers if name != HEARTH]
    own, killed, best = [], [], []
    for model in results.models:
        own.append(read_over(results, model, HEARTH, SUB_AGENTS, "ideal_tokens"))
        killed.append(read_over(results, model, HEARTH, KILLED, "prompt_tokens"))
        told = [read_over(results, model, each, SUB_AGENTS, "ideal_tokens") for each in others]
        best.append(min((each for each in told if each is not None), default=None))
    small = all(each.is_stand_in for each in results.models.values())
    models = f"{_COUNTS[len(own)]} {'tiny ' * small}model{'s' * (len(own) != 1)}"
    rivals = " and ".join(", ".join(others).rsplit(", ", 1))
    return textwrap.fill(
        f"On {models}, in sessions with sub-agents, Hearth read **{_range(own)} times** what a "
        f"perfect cache would; the best of {rivals} for each model read {_range(best)} times. "
        f"After `kill -9` Hearth read **{_range(killed, 1, 100)} %** of the last prompt "
        "again ([how it was measured](docs/measuring.md#compare-with-other-servers)).",
        LINE_CHARS,
        break_on_hyphens=False,
    )


def _range(values: Sequence[float | None], digits: int = 2, times: int = 1) -> str:
    """Return the least and the most, once where they look alike."""
    known = sorted(times * each for each in values if each is not None)
    if len(known) < len(values) or not known:
        raise ValueError("A model of these results has no count of sub-agents or kill.")
    return " to ".join(dict.fromkeys((f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}")))


if __name__ == "__main__":
    print(headline(Results.load(RESULTS)))
