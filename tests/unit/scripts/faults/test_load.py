"""The load: what it sends is whole, and each request it begins is entered with one end."""

import pytest

from scripts.faults.judge_replies import End
from scripts.faults.load import (
    AMID_A_FAULT,
    CALM,
    Asked,
    Ledger,
)

pytestmark = pytest.mark.process


def entered(stage: str, kind: str, later: str = "") -> Ledger:
    """Enter one end of a request that began in `stage` and ends in `later`."""
    ledger = Ledger()
    ledger.stage = later or stage
    ledger.note(stage, Asked("page", "chat", b""), End(kind), 0.0)  # type: ignore[arg-type]
    return ledger


def test_in_calm_an_answer_is_the_only_good_end() -> None:
    assert not entered(CALM, "answered").misses
    for kind in ("busy", "failed", "refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind).misses, kind


def test_amid_a_fault_an_error_is_a_good_end_and_a_wrong_answer_never() -> None:
    for kind in ("answered", *AMID_A_FAULT):
        assert not entered("flood", kind).misses
        assert not entered(CALM, kind, later="flood").misses
    for kind in ("refused", "cut", "hung", "bug", "malformed", "wrong"):
        assert entered(CALM, kind, later="flood").misses, kind
        assert entered("flood", kind).misses, kind
