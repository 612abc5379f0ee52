"""`/v1/cache` counts of drafts what answers got of them, as their usage does."""

from functools import cache

from hypothesis import given, strategies as st

from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts, DraftPolicy
from scripts.harness.socketless_worker import machine

TOKENS = 24
PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(40)]
FLAT = {1: 1.0, 8: 1.01}  # so that drafts are long


@cache
def plain() -> list[int]:
    return (
        machine("qwen3", tiny=True, drafts=AnswerDrafts(DraftPolicy())).ask(PROMPT, TOKENS).tokens
    )


def counts(worker_drafts: AnswerDrafts) -> dict[str, int]:
    report = worker_drafts.report()
    told = {
        name: sum(row[name] for row in report["by_source"].values())
        for name in ("drafted", "accepted")
    }
    return told | {"tokens": report["tokens"], "forwards": report["forwards"]}


@given(st.integers(0, TOKENS - 1), st.integers(1, TOKENS), st.booleans())
def test_accepted_are_those_that_an_answer_got_wherever_a_stop_or_its_limit_ends_it(
    end: int, limit: int, lies: bool
) -> None:
    drafts = AnswerDrafts(DraftPolicy("lookup", "all", "all", curve=FLAT))
    worker = machine("qwen3", tiny=True, drafts=drafts, end_ids=frozenset({plain()[end]}))
    prediction = [77 if lies and place % 7 == 6 else t for place, t in enumerate(plain())]
    said = worker.ask(PROMPT, limit, prediction=prediction)
    usage, told = said.usage, counts(drafts)
    assert usage is not None and said.tokens == plain()[: usage.completion_tokens]
    assert told["tokens"] == usage.completion_tokens
    assert told["accepted"] == usage.accepted_prediction_tokens
    assert told["drafted"] - told["accepted"] == usage.rejected_prediction_tokens
    assert told["forwards"] == usage.decode_forwards
    assert told["accepted"] + told["forwards"] == told["tokens"], "none lies behind the end"
    speedup = drafts.report()["speedup_estimate"]
    assert speedup is None or speedup <= usage.completion_tokens / usage.decode_forwards + 1e-3
