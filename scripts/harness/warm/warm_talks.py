"""Leads random conversations on a warm worker and compares each answer with a cold one."""

import functools
import random
from typing import Any

from hypothesis import strategies as st

from hearth.worker.cache.block_hash import common_length, pack
from hearth.worker.cache_report import cache_report
from hearth.worker.engine.model_loader import LoadedModel
from scripts.harness.socketless_worker import Answer, loaded
from scripts.harness.warm.token_margins import same_bits, same_tokens

TOKENS_MAX = 12

OPERATION_NAMES = (
    *("extend",) * 4,
    *("edit", "branch", "again", "shorter", "cancel", "leave", "idle"),
    *("together", "forget", "wipe", "bare"),
)
OPERATIONS_MIN, OPERATIONS_MAX = 4, 9
SEED_MAX = 10**6

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(OPERATION_NAMES), st.integers(0, SEED_MAX)),
    min_size=OPERATIONS_MIN,
    max_size=OPERATIONS_MAX,
)


class Talk:
    """Conversations on one warm machine, each prompt checked against a cold one."""

    def __init__(self, name: str | LoadedModel, warm: Any, cold: Any) -> None:
        """`name` is a fixture's, or the model itself."""
        model = loaded(name) if isinstance(name, str) else name
        encode = functools.partial(model.tokenizer.encode, add_special_tokens=False)
        self.turn_end: list[int] = encode("<|im_end|>\n")
        self.header: dict[str, list[int]] = {
            role: encode("<|im_start|>") + encode(f"{role}\n")
            for role in ("system", "user", "assistant")
        }
        self.warm, self.cold = warm, cold
        self.prompts: list[list[int]] = []  # conversations, each ready to be answered
        self.prefilled: list[list[int]] = []  # prompts whose prefill came to its end
        # By prompt what the cold machine was asked and answered.
        self.cold_answers: dict[tuple[int, ...], Answer] = {}
        self.directory = model.directory
        self.fixture = name if isinstance(name, str) else ""

    def words(self, chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(300, 2900) for _ in range(count)]

    def message(self, role: str, ids: list[int]) -> list[int]:
        return self.header[role] + ids + self.turn_end

    def opening(self, chance: random.Random) -> list[int]:
        shared = self.words(random.Random(chance.randrange(2)), 90)  # one of two system prompts
        ids = self.message("system", shared)
        ids += self.message("user", self.words(chance, chance.choice([5, 40, 150])))
        return ids + self.header["assistant"]

    def turn(self, chance: random.Random, ids: list[int], answer: list[int]) -> list[int]:
        """Return the prompt that follows `answer` to the prompt `ids`."""
        said = self.words(chance, chance.choice([1, 20, 70, 150]))
        return ids + answer + self.turn_end + self.message("user", said) + self.header["assistant"]

    def whole(self, ids: list[int]) -> list[int]:
        """Return the beginning of a prompt, without what may not be broken off."""
        return ids

    def expected(self, ids: list[int]) -> Answer:
        if tuple(ids) not in self.cold_answers:
            self.cold.scheduler.forget()  # for one that keeps too: it quantises as warm does
            self.cold_answers[tuple(ids)] = self.cold.ask(ids, TOKENS_MAX)
        return self.cold_answers[tuple(ids)]

    def ask(self, ids: list[int], is_exact: bool) -> Answer:
        answer: Answer = self.warm.ask(ids, TOKENS_MAX)
        self.compare(answer, ids, is_exact)
        self.prefilled.append(ids)
        return answer

    def compare(self, answer: Answer, ids: list[int], is_exact: bool) -> None:
        assert answer.prefilled + answer.cached == len(ids)
        (same_bits if is_exact else same_tokens)(answer, self.expected(ids))

    def best_cut(self, ids: list[int]) -> int:
        """Return up to where some earlier prompt was prefilled by the very same forwards."""
        cuts, best = self.warm.rule.cuts(ids), [0]
        for other in self.prefilled:
            shared = common_length(pack(ids), pack(other))
            same = common_length(pack(cuts), pack(self.warm.rule.cuts(other)))
            best += [cut for cut in cuts[:same] if cut <= shared]
        return max(best)


def play(
    talk: Talk, operations: list[tuple[str, int]], is_exact: bool, is_ample: bool = True
) -> None:
    """Do the operations; compare every answer with a cold one.

    With an ample budget nothing is read twice; with less, the budget is kept to.
    """
    chance = random.Random(operations[0][1])
    talk.prompts = [talk.opening(chance)]
    budget = talk.warm.keeper.store.budget
    for what, seed in operations:
        chance = random.Random(seed)
        ids = chance.choice(talk.prompts)
        step(talk, what, chance, ids, is_exact, is_ample)
        talk.warm.check()
        cache_report(talk.warm.keeper, 0)
        assert budget.bytes_used <= budget.bytes_max
        assert len(talk.warm.keeper.slots) <= talk.warm.keeper.rules.slots_max


def step(
    talk: Talk,
    what: str,
    chance: random.Random,
    ids: list[int],
    is_exact: bool,
    is_ample: bool,
) -> None:
    warm = talk.warm
    match what:
        case "forget":
            warm.scheduler.forget()
            talk.prefilled.clear()
        case "idle":
            warm.work_ahead(chance.randrange(1, 6))
        case "cancel" | "leave" | "wipe":  # amid its prefill, or its answer
            answer = warm.submit(ids, TOKENS_MAX)
            for _ in range(chance.randrange(1, 12 if what == "wipe" else 6)):
                warm.step()
            if what == "leave":
                warm.run(until=lambda: answer.request.completion_tokens > 2)
            answer.request.lease.is_cancelled = what != "wipe"
            if what == "wipe":  # the cache is emptied, and the client stays
                warm.scheduler.forget()
                talk.prefilled.clear()
            warm.run()
            if what == "wipe":
                talk.compare(warm.settled(answer), ids, is_exact)
            talk.ask(ids, is_exact)
        case "together":
            others = [chance.choice(talk.prompts), talk.opening(chance)]
            answers = [(warm.submit(one, TOKENS_MAX), one) for one in (ids, *others)]
            warm.step()
            cache_report(warm.keeper, 0)
            warm.run()
            for answer, one in answers:
                talk.compare(warm.settled(answer), one, is_exact)
                talk.prefilled.append(one)
        case "bare":  # no generation prompt at its end, and something else goes on behind it
            bare = ids[: -len(talk.header["assistant"])] + talk.words(chance, 30)
            talk.ask(bare, is_exact)
            talk.ask(bare + talk.words(chance, 90), is_exact)
        case "shorter":
            cuts = [cut for cut in warm.rule.natural(ids) if cut > 20]
            talk.ask(ids[: chance.choice(cuts)] + talk.header["assistant"], is_exact)
        case _:  # again, extend, edit or branch
            edited = talk.whole(ids[:-30]) + talk.words(chance, 40)
            prompt = {"edit": edited, "branch": talk.opening(chance)}.get(what, ids)
            kept = talk.best_cut(prompt)
            answer = talk.ask(prompt, is_exact)
            assert not is_ample or kept <= answer.cached, f"{kept - answer.cached} read twice"
            if what == "extend":
                talk.prompts.append(talk.turn(chance, prompt, answer.tokens))
            elif what == "branch":
                talk.prompts.append(prompt)


# One of each kind of layers, for what is about the store rather than about the arithmetic.
KINDS = ("qwen3", "qwen3_5", "gpt_oss", "deepseek_v32", "falcon_h1")
# Of layers that choose tokens, pool them, or keep pending ones (scripts/harness/architectures.py):
AUTUMN_NAMES = (
    *("mlx_vlm/qwen4_exp", "mlx_vlm/deepseek_v4", "mlx_vlm/deepseek_v41", "mlx_lm/deepseek_v41"),
    *("mlx_vlm/glm5_next", "mlx_vlm/hy_v4"),
)
