"""Measures how far the log probabilities of a warm answer differ from a cold one's."""

import numpy as np

from scripts.harness.socketless_worker import Machine
from tests.helpers.worker.kv_prompts import follow, message, words

TOKENS_MAX = 5


def difference(warm: Machine, cold: Machine, name: str, length: int = 60) -> float:
    """Play three turns; return the largest difference of a log probability, inf for a token."""
    history = message(name, "user", words(0, length)) + message(name, "assistant", [])
    largest = 0.0
    for turn in range(3):
        one, other = warm.ask(history, TOKENS_MAX), cold.ask(history, TOKENS_MAX)
        if one.tokens != other.tokens:
            return float("inf")
        for mine, theirs in zip(one.logits, other.logits, strict=True):
            largest = max(largest, float(np.abs(mine - theirs).max()))
        history = follow(name, history, one.tokens, length, seed=turn + 1)
        warm.work_ahead()
    return largest
