"""Makes prompts for tests of kept KV and asks a socketless worker about them."""

import random

from scripts.harness.socketless_worker import Machine, loaded

KINDS = ["qwen3", "qwen3_5", "gpt_oss"]  # dense, hybrid, window


def words(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(300, 2900) for _ in range(count)]


def message(name: str, role: str, ids: list[int]) -> list[int]:
    tokenizer = loaded(name).tokenizer
    head: list[int] = tokenizer.encode(f"<|im_start|>{role}\n", add_special_tokens=False)
    end: list[int] = tokenizer.encode("<|im_end|>\n", add_special_tokens=False)
    return head + ids + end if ids else head


def prompt(name: str, *lengths: int, seed: int = 0) -> list[int]:
    """Return system, then users, of these lengths, and the generation prompt."""
    ids = message(name, "system", words(seed, lengths[0]))
    for number, length in enumerate(lengths[1:]):
        ids += message(name, "user", words(1000 * seed + number + 1, length))
    return ids + message(name, "assistant", [])


def follow(name: str, ids: list[int], answer: list[int], length: int, seed: int = 7) -> list[int]:
    """Return the prompt of the next turn."""
    end: list[int] = loaded(name).tokenizer.encode("<|im_end|>\n", add_special_tokens=False)
    said = message(name, "user", words(seed, length))
    return ids + answer + end + said + message(name, "assistant", [])


def kept_bytes(warm: Machine) -> int:
    return int(warm.keeper.store.budget.bytes_used)
