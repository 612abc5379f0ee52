"""Holds what `hearth eval` found, and tells it: as tables, as JSON, as a verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hearth.commands.accuracy.answer_changes import (
    Change,
    LogprobDifference,
    Replies,
    Reply,
    around,
    changes,
    largest_logprob_difference,
    right_count,
    with_other_prompts,
)
from hearth.commands.accuracy.question_file import Question
from hearth.commands.accuracy.saved_answers import SavedRun
from hearth.commands.server_client import Row, table

CHANGES_SHOWN_MAX: Final = 20
IDS_SHOWN_MAX: Final = 8


@dataclass(slots=True)
class PassResult:
    """What one pass over the questions found."""

    name: str
    replies: dict[str, Reply] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # by the question's id
    took_s: float = 0.0

    @property
    def hits(self) -> int:
        return sum(reply.cached_tokens > 0 for reply in self.replies.values())

    @property
    def cached_share(self) -> float:
        prompt = sum(reply.prompt_tokens for reply in self.replies.values())
        return sum(reply.cached_tokens for reply in self.replies.values()) / max(1, prompt)

    @property
    def sources(self) -> Counter[str]:
        return Counter(reply.source for reply in self.replies.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes between two passes, and how far the same answers are apart."""

    before: str
    after: str
    compared: int  # questions that both passes asked with the same tokens
    with_other_prompts: list[str]  # those that were not, which say nothing
    changes: list[Change]
    logprob: LogprobDifference | None

    @classmethod
    def of(cls, before: str, one: Replies, after: str, other: Replies) -> "Comparison":
        apart = with_other_prompts(one, other)
        same = {each: one[each] for each in one if each in other and each not in apart}
        return cls(
            *(before, after, len(same), apart),
            changes(same, other),
            largest_logprob_difference(same, other),
        )


# ---------------------------------------------------------------- judging


@dataclass(slots=True)
class EvalReport:
    """All that a run found, and what it means."""

    questions: Sequence[Question]
    grade: str
    passes: list[PassResult]
    compared: list[Comparison]
    saved: SavedRun | None = None  # another run, and `against` what changed since
    against: list[Comparison] = field(default_factory=list)

    @property
    def ideals(self) -> dict[str, tuple[str, ...]]:
        return {question.id: question.ideals for question in self.questions}

    @property
    def changed(self) -> list[str]:
        """The questions whose answers changed, in the file's order."""
        found = {
            change.question for each in (*self.compared, *self.against) for change in each.changes
        }
        return [question.id for question in self.questions if question.id in found]

    @property
    def refused(self) -> list[str]:
        found = {each for one in self.passes for each in one.errors}
        return [question.id for question in self.questions if question.id in found]

    @property
    def checked(self) -> int:
        """How many answers show something: warm ones, to the tokens of the cold prompt."""
        apart = set(self.compared[-1].with_other_prompts)
        warm = self.passes[-1].replies
        return sum(reply.cached_tokens > 0 for each, reply in warm.items() if each not in apart)

    @property
    def status(self) -> int:
        if self.changed:
            return 1
        return 2 if self.refused or not self.checked else 0

    def accuracy(self, replies: Replies) -> str:
        graded = sum(bool(self.ideals.get(each)) for each in replies)
        if not graded:
            return "-"
        right = right_count(replies, self.ideals, self.grade)
        return f"{right} of {graded} ({right / graded:.1%})"


def verdict_of(report: EvalReport) -> str:
    """Return the last line: whether anything changed, and what that means."""
    count = len(report.questions)
    if report.changed:
        meaning = _CHANGED if any(each.changes for each in report.compared) else _SETTINGS
        told = f"verdict: CHANGED: {len(report.changed)} of {count} answers: "
        return f"{told}{_some(report.changed)}. {meaning}"
    if report.refused:
        return f"verdict: none: {len(report.refused)} of {count} refused: {_some(report.refused)}"
    if not report.checked:
        return f"verdict: none: of {count} prompts that were asked before none was kept. {_NONE}"
    since = ", nor since the saved run" if report.saved else ""
    rest = count - report.checked
    told = f"verdict: good: none of {report.checked} answers changed{since}"
    return f"{told}; {rest} not checked: nothing was kept, or other tokens" if rest else told


_SETTINGS: Final = "The cache changed none of them: the runs differ in settings or model."
_NONE: Final = "The model's cache cannot be restored (hearth cache), or the prompts are too short."
_CHANGED: Final = (
    "With CACHE_EXACT=true this is a bug, please report it. Without it KV may be reused that "
    "decoding wrote or that was quantised, which is not to the bit what a cold run makes: start "
    "the server with it and ask again."
)


def _some(ids: Sequence[str]) -> str:
    rest = len(ids) - IDS_SHOWN_MAX
    return ", ".join(ids[:IDS_SHOWN_MAX]) + (f" and {rest} more" if rest > 0 else "")


# ---------------------------------------------------------------- telling


def show(report: EvalReport) -> None:
    """Print the report as tables."""
    head = ("pass", "answers", "right", "hits", "cached", "from", "errors", "s")
    print(table(head, [pass_row(report, each) for each in report.passes]))
    if report.saved is not None:
        rows = [(name, report.accuracy(found)) for name, found in report.saved.passes.items()]
        print("", table(("saved pass", "right"), rows), sep="\n")
    for comparison in (*report.compared, *report.against):
        print("", *comparison_lines(comparison), sep="\n")
    for result in report.passes:
        for each, error in list(result.errors.items())[:CHANGES_SHOWN_MAX]:
            print(f"{each}, {result.name}: {error}")
    print(verdict_of(report))


def pass_row(report: EvalReport, result: PassResult) -> tuple[Any, ...]:
    return (
        result.name,
        len(result.replies),
        report.accuracy(result.replies),
        result.hits,
        f"{result.cached_share:.1%}",
        ", ".join(f"{source} {count}" for source, count in result.sources.most_common()) or "-",
        len(result.errors),
        f"{result.took_s:.1f}",
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return what a comparison tells, with the answers that changed side by side."""
    names = f"{comparison.before} and {comparison.after}"
    lines = [f"{names}: {len(comparison.changes)} of {comparison.compared} answers changed"]
    if (found := comparison.logprob) is not None:
        where = f"{found.question}, token {found.place + 1} {found.token!r}"
        told = f"differ by {found.difference:.3g} at most ({where})"
        lines.append(f"log probabilities {told if found.difference else 'are the same'}")
    if apart := comparison.with_other_prompts:
        lines.append(
            f"{len(apart)} not compared, since their prompts were other tokens (turns that the "
            f"server sampled itself, or another model): {_some(apart)}"
        )
    rows = [
        (each.question, each.at, around(each.before, each.at), around(each.after, each.at))
        for each in comparison.changes[:CHANGES_SHOWN_MAX]
    ]
    if rows:
        lines.append(table(("question", "from", comparison.before, comparison.after), rows))
    return lines


def as_json(report: EvalReport) -> Row:
    """Return the report for programs."""
    return {
        "status": report.status,
        "verdict": verdict_of(report),
        "grade": report.grade,
        "changed": report.changed,
        "passes": [
            {
                "pass": each.name,
                "answers": len(each.replies),
                "graded": sum(bool(report.ideals.get(name)) for name in each.replies),
                "right": right_count(each.replies, report.ideals, report.grade),
                "hits": each.hits,
                "cached_share": each.cached_share,
                "sources": dict(each.sources),
                "errors": each.errors,
                "took_s": each.took_s,
            }
            for each in report.passes
        ],
        "compared": [asdict(each) for each in (*report.compared, *report.against)],
    }
