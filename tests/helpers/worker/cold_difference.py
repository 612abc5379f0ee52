"""Measures how far the log probabilities of a warm answer differ from a cold one's."""

import random
from collections.abc import Iterator

import numpy as np

from scripts.harness.socketless_worker import Machine, loaded

TOKENS_MAX = 5


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300, 2900) for _ in range(count)]


def turns(name: str, count: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (what comes behind the last answer, the assistant's header) for each turn."""
    tokenizer = loaded(name).tokenizer

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return encoded

    for turn in range(count):
        before = ids("<|im_end|>\n") if turn else []
        said = before + ids("<|im_start|>user\n") + words(turn, length) + ids("<|im_end|>\n")
        yield said, ids("<|im_start|>assistant\n")


def difference(warm: Machine, cold: Machine, name: str, length: int = 60) -> float:
    """Play three turns; return the largest difference of a log probability, inf for a token."""
    history: list[int] = []
    largest = 0.0
    for said, header in turns(name, 3, length):
        history += said + header
        one, other = warm.ask(history, TOKENS_MAX), cold.ask(history, TOKENS_MAX)
        if one.tokens != other.tokens:
            return float("inf")
        for mine, theirs in zip(one.logits, other.logits, strict=True):
            largest = max(largest, float(np.abs(mine - theirs).max()))
        history += one.tokens
        warm.work_ahead()
    return largest
