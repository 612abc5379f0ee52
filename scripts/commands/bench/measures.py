"""Names everything that `hearth bench` measures, with its unit and which way is better.

A workload gives the values of one visit by these names; page, comparison and JSON read no others.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Unit(StrEnum):
    """What a value is counted in."""

    TOKENS = "tokens"
    TIMES = "x"  # a ratio
    SHARE = "share"  # 0 to 1
    SECONDS = "s"
    PER_SECOND = "tokens/s"
    BYTES = "bytes"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Measure:
    """One measure. Differences of less than `least` are no difference, whatever the spread."""

    name: str
    label: str  # a few words, as a table's row has them
    unit: Unit
    is_more_better: bool | None  # None: it is told, not compared
    least: float = 0.0


MEASURES: Final = {
    measure.name: measure
    for measure in (
        # Told by the meter in attention, idle time included (or by the server's own usage).
        # The meter leaves out what is read alone, about a token a request on some servers.
        Measure("read_tokens", "tokens read", Unit.TOKENS, False, 32),
        Measure("idle_tokens", "read while idle", Unit.TOKENS, None),
        Measure("claimed_tokens", "read, as the server says", Unit.TOKENS, None),
        Measure("ideal_tokens", "the ideal", Unit.TOKENS, None),
        Measure("prompt_tokens", "tokens of the prompts", Unit.TOKENS, None),
        Measure("requests", "requests answered", Unit.COUNT, None),
        # Seen from the client.
        Measure("ttft_p50_s", "first token, p50", Unit.SECONDS, False, 0.02),
        Measure("ttft_p95_s", "first token, p95", Unit.SECONDS, False, 0.02),
        Measure("gap_p50_s", "gap between tokens, p50", Unit.SECONDS, False, 0.0005),
        Measure("gap_p99_s", "gap between tokens, p99", Unit.SECONDS, False, 0.002),
        Measure("gap_over_alone", "gap over the gap alone", Unit.TIMES, False, 0.1),
        Measure("tokens_s", "tokens a second, all streams", Unit.PER_SECOND, True, 0.5),
        Measure("forwards_per_token", "forwards a token", Unit.TIMES, False, 0.1),
        Measure("wall_s", "wall time", Unit.SECONDS, False, 0.05),
        Measure("valid_share", "answers that obey the schema", Unit.SHARE, True),
        Measure("same_answers", "cold = warm", Unit.SHARE, True),
        Measure("failed", "failed or refused requests", Unit.COUNT, None),
        # Seen from the operating system, over all processes of the server.
        Measure("cpu_s", "CPU seconds", Unit.SECONDS, False, 0.05),
        Measure("memory_bytes", "memory", Unit.BYTES, False, 5e6),
        Measure("written_bytes", "written to disk", Unit.BYTES, False, 1e6),
        Measure("start_s", "start to ready", Unit.SECONDS, False, 0.1),
        Measure("load", "load of the machine, one minute", Unit.COUNT, None),
    )
}
