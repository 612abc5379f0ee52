"""Answers whose prompts begin alike share a trunk in the real scheduler, and say the same."""

import random
from dataclasses import replace
from functools import cache

import pytest

from scripts.harness.socketless_worker import Answer, Machine, machine
from scripts.harness.warm.token_margins import same_tokens

TRUNK, ANSWER = 1_100, 16
CHUNK = 512
CHANCE = random.Random(5)
COMMON = [CHANCE.randrange(20, 3000) for _ in range(TRUNK)]
# Three choices of one request, as the proxy asks for them, and agents behind one system prompt.
PROMPTS = {
    "choices": [[*COMMON, 7, 8, 9]] * 3,
    "agents": [[*COMMON, *range(50 + 40 * n, 60 + 49 * n)] for n in range(4)],
}


def made(name: str) -> Machine:
    return machine(name, tiny=True, chunk=CHUNK, slots_max=6)


@cache
def alone(name: str, prompt: tuple[int, ...]) -> Answer:
    return made(name).ask(list(prompt), ANSWER)


def assert_said(name: str, answer: Answer) -> None:
    count = answer.usage.completion_tokens if answer.usage is not None else 0
    whole = alone(name, tuple(answer.request.ids))
    same_tokens(answer, replace(whole, tokens=whole.tokens[:count]))


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("who", PROMPTS)
def test_those_who_begin_alike_share_one_trunk_and_say_what_each_says_alone(
    name: str, who: str
) -> None:
    worker, prompts = made(name), PROMPTS[who]
    answers = [worker.submit(prompt, ANSWER) for prompt in prompts]
    decoder = worker.engine.decoder
    worker.run(until=lambda: len(decoder.trunks) == len(prompts))
    (trunk,) = set(decoder.trunks.values())
    assert trunk.length >= TRUNK
    told = worker.scheduler.decoder.trunks_report()
    spared = (len(prompts) - 1) * trunk.nbytes
    assert told == {"count": 1, "rows": len(prompts), "spared_bytes": spared}
    worker.run()
    for answer in answers:
        assert_said(name, worker.settled(answer))
        assert answer.reason == "length"
    assert decoder.batch_bytes == 0
    assert worker.scheduler.decoder.trunks_report() == {"count": 0, "rows": 0, "spared_bytes": 0}
    worker.check()


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.night) for seed in range(2, 6))]
)
def test_who_is_cancelled_at_any_step_takes_nothing_from_the_others(seed: int) -> None:
    chance = random.Random(seed)
    worker, shared = made("qwen3"), 0
    waiting = [prompt for who in PROMPTS for prompt in PROMPTS[who]]
    answers: list[Answer] = []
    running: list[Answer] = []
    while waiting or not worker.scheduler.is_idle:
        if waiting and chance.random() < 0.3:
            answers.append(worker.submit(waiting.pop(chance.randrange(len(waiting))), ANSWER))
            running.append(answers[-1])
        if running and chance.random() < 0.1:
            gone = running.pop(chance.randrange(len(running)))
            gone.request.lease.is_cancelled = True
        if not worker.scheduler.is_idle:
            worker.step()
        running = [answer for answer in running if not answer.reason]
        shared = max(shared, worker.scheduler.decoder.trunks_report()["rows"])
    assert shared >= 2
    for answer in answers:
        assert_said("qwen3", worker.settled(answer))
    assert worker.engine.decoder.batch_bytes == 0 and len(worker.engine.decoder) == 0
    worker.check()
