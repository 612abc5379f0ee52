"""Sorts workloads into the sections of the page, and says what each section draws."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One section. A workload is of it if its name begins with one of `beginnings`."""

    anchor: str
    title: str
    about: str
    beginnings: tuple[str, ...]
    drawn: tuple[str, ...]  # measures, by name; those that nothing was measured of are left out


KINDS: Final = (
    WorkloadKind(
        "sessions",
        "Sessions and sub-agents",
        "Every turn sends nearly the same prompt again. Over the ideal, 1 means that each token "
        "of a prompt was read once.",
        (*("linear", "claude", "codex", "live", "sub-agent", "shared", "fork", "edit"),),
        ("read_over_ideal", "ttft_p50_s"),
    ),
    WorkloadKind(
        "cancelled",
        "Cancelled requests",
        "A prompt is cancelled at 45 % of the time that it takes and sent again. What is read for "
        "a client that has gone counts.",
        ("cancel",),
        ("read_per_prompt", "ttft_p50_s"),
    ),
    WorkloadKind(
        "restarts",
        "Restarts, and memory that is full",
        "The next turn after a clean stop and start, before which other sessions were played, "
        "after kill -9, and ten sessions in the memory of one.",
        ("restart", "before-kill", "kill", "day"),
        ("read_per_prompt", "ttft_p50_s"),
    ),
    WorkloadKind(
        "images",
        "Images",
        "An image stays in the history while the talk goes on.",
        ("image",),
        ("read_per_prompt", "ttft_p50_s"),
    ),
    WorkloadKind(
        "streams",
        "Streams at once",
        "Tokens a second over all streams, and the gaps that a reader sees.",
        ("stream", "beside"),
        ("tokens_s", "gap_p99_s"),
    ),
    WorkloadKind(
        "structured",
        "Structured output",
        "Answers that must obey a JSON schema.",
        ("structured",),
        ("valid_share", "tokens_s"),
    ),
    WorkloadKind(
        "answers",
        "The same answers, cold and warm",
        "Of all answers, those that are the same with the cache switched off, and in each round.",
        ("answers",),
        ("same_answers",),
    ),
    WorkloadKind(
        "rest",
        "At rest",
        "A server that has no request.",
        ("at-rest",),
        ("memory_bytes", "cpu_s"),
    ),
)
OTHERS: Final = WorkloadKind("others", "Other workloads", "", (), ("read_over_ideal", "ttft_p50_s"))


def kind_of(workload: str) -> WorkloadKind:
    """Return the section that a workload stands in."""
    name = workload.replace("_", "-")
    found = (each for each in KINDS if name.startswith(each.beginnings))
    return next(found, OTHERS)
