"""The examination of builtin:pocket's weights, with names that no training conversation had.

Fewer questions are asked than the limits were set for: an interval of 95 % must not lie below
them.
`python -m scripts.pocket.train evaluate worker/engine/pocket` asks 200 of each.
"""

from hearth.worker.engine.model_loader import POCKET_DIR
from scripts.pocket.evaluate import NEWCOMER, RECALL_4K, evaluate

LIMITS = {
    "copies a fact at 1k tokens": 0.95,
    RECALL_4K: 0.80,
    "right tool, right arguments": 0.90,
    "uses the tool's result": 0.95,
    NEWCOMER: 0.85,
    "ends its turn": 1.0,
    "thinks if and only if asked": 0.99,
}


def test_it_can_what_it_is_for() -> None:
    """One test, since two workers of pytest would each examine it."""
    rates = evaluate(POCKET_DIR, short=20, long=4)
    missed = {
        skill: [str(rate), *rate.missed]
        for skill, rate in rates.items()
        if rate.interval[1] < LIMITS[skill]
    }
    assert not missed, missed
    assert rates.keys() == LIMITS.keys()
