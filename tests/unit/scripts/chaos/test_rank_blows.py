"""Kills and stops of ranks are held to seconds, to ends of requests, and to answers."""

from dataclasses import replace

from scripts.chaos.judge_replies import End
from scripts.chaos.ranks import (
    ERROR_S_MAX,
    RECOVERY_S,
    STALL_MARGIN_S,
    STALL_SECONDS,
    Asked,
    Blow,
    cached_tokens,
    judged,
    lines,
)

START_S = 3.0
GOOD = Blow("SIGKILL", 1, "decode", True, ["failed"], 0.2, 4.0, 0, True, 2_000, "502", [])
FAILED = [Asked(End("failed"))]


def test_a_blow_with_one_error_each_and_a_quick_return_misses_nothing() -> None:
    assert judged(GOOD, START_S, FAILED).misses == []


def test_late_errors_late_returns_processes_left_and_other_answers_are_missed() -> None:
    late = replace(GOOD, error_s=ERROR_S_MAX + 0.1)
    assert "an error came after 2.1 s" in judged(late, START_S, FAILED).misses[0]
    slow = replace(GOOD, back_s=START_S + RECOVERY_S + 0.1)
    assert "back after 8.1 s" in judged(slow, START_S, FAILED).misses[0]
    assert judged(replace(GOOD, left=1), START_S, FAILED).misses
    assert judged(replace(GOOD, is_answer_cold=False), START_S, FAILED).misses


def test_a_request_that_hangs_or_is_cut_is_missed() -> None:
    for kind in ("hung", "cut", "malformed", "bug"):
        assert judged(GOOD, START_S, [Asked(End(kind))]).misses  # type: ignore[arg-type]


def test_a_stopped_rank_may_take_as_long_as_a_stall() -> None:
    stopped = replace(GOOD, signal="SIGSTOP", error_s=STALL_SECONDS + STALL_MARGIN_S - 0.1)
    assert judged(stopped, START_S, FAILED).misses == []
    assert judged(replace(stopped, error_s=stopped.error_s + 0.2), START_S, FAILED).misses


def test_cached_tokens_are_those_of_the_last_usage() -> None:
    stream = b'data: {"usage": {"prompt_tokens_details": {"cached_tokens": 17}}}\n\ndata: [DONE]'
    assert cached_tokens(stream) == 17
    assert cached_tokens(b"data: {}") == -1


def test_lines_name_what_was_missed() -> None:
    told = "\n".join(lines([GOOD, replace(GOOD, misses=["too late"])], START_S))
    assert "SIGKILL: 2 times; error after 0.20 s, at most 0.20 s" in told
    assert "MISSED SIGKILL rank 1 amid decode: too late" in told
