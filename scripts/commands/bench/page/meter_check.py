"""Holds what the meter counts to what the servers say themselves, and remarks where they differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hearth.commands.bench.page.agent_hour import CANCELLED
from hearth.commands.bench.page.page_lines import PageLines
from hearth.commands.bench.page.value_format import listed

COUNTS_ALIKE: Final = 0.05  # of what a server says it read: that much more or less is told
TELLS_NOTHING: Final = 0.98  # of its prompts: who says so many were read found nothing, or is mute
TOKENS_MIN: Final = 500  # of fewer, a token a request that is read alone is a share


def counted_otherwise(lines: PageLines) -> Iterator[str]:
    """Tell where the meter and a server do not agree on what it read: one of them errs."""
    for server in lines.servers:
        more: dict[str, list[float]] = {}
        less: dict[str, list[float]] = {}
        for model in lines.models:
            for workload in lines.workloads:
                factor = _counted_over_claimed(lines, model, server, workload)
                if factor is not None and abs(factor - 1) > COUNTS_ALIKE:
                    (more if factor > 1 else less).setdefault(workload, []).append(factor)
        if more:
            yield (
                f"{server}: the meter counts {_ends(more)} times what it says itself in "
                f"{listed(list(more))}. That is padding between prompts of different lengths that "
                "are read in one batch, or what it read and does not tell."
            )
        if less:
            yield (
                f"{server}: the meter counts {_ends(less)} times what it says itself in "
                f"{listed(list(less))}. It may compute attention where the meter does not look: "
                "these counts flatter it, or it reads single tokens."
            )


def _counted_over_claimed(lines: PageLines, model: str, server: str, workload: str) -> float | None:
    """Return the factor; None where there is no pair, or few tokens."""
    found = {
        name: line.median
        for name in ("read_tokens", "claimed_tokens", "prompt_tokens", "failed")
        if (line := lines.line(model, server, workload, name)) is not None
    }
    read, claimed = found.get("read_tokens", 0.0), found.get("claimed_tokens", 0.0)
    facts = lines.results.servers.get(server)
    # Of a cancelled sending it says nothing, and some never say what they found in the cache.
    # More than it says is more all the same.
    tells = read > claimed or claimed < TELLS_NOTHING * found.get("prompt_tokens", 0.0)
    is_whole = not found.get("failed") and not workload.startswith(CANCELLED)
    is_metered = facts is None or facts.is_metered
    if not (tells and is_whole and is_metered and min(read, claimed) >= TOKENS_MIN):
        return None
    return read / claimed


def _ends(factors: Mapping[str, Sequence[float]]) -> str:
    values = [each for found in factors.values() for each in found]
    ends = dict.fromkeys((f"{min(values):.2f}", f"{max(values):.2f}"))
    return " to ".join(ends)
