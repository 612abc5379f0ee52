"""A prompt whose client leaves while it is rendered or tokenised: the work ends there."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hearth.worker.prompt.awaited_work import ClientLeft, while_client_waits
from hearth.worker.prompt.prompt_with_sampled_turns import PromptContent
from hearth.worker.prompt.tokenise import PieceCache
from scripts.harness.model_families import FAMILIES
from tests.helpers.worker.prompt_builders import builder

TURNS = [
    {"role": role, "content": f"{role} {number}"}
    for number in range(50)
    for role in ("user", "assistant")
]
CONTENT = PromptContent([*TURNS, {"role": "user", "content": "and now"}], [])


class Leaving:
    """A client that is there while it is asked for `answers` times."""

    def __init__(self, answers: int) -> None:
        self.left = answers
        self.asked = 0

    @property
    def is_gone(self) -> bool:
        self.asked += 1
        return self.asked > self.left


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("answers", [0, 20])
def test_rendering_ends_where_its_client_leaves(name: str, answers: int) -> None:
    prompts, client = builder(name), Leaving(answers)
    failures = prompts._renderer.template_failures
    with while_client_waits(client), pytest.raises(ClientLeft) as caught:
        prompts.build(CONTENT)
    assert (caught.value.status, caught.value.code) == (499, "client_closed")
    assert client.asked == answers + 1, "it went on"
    assert prompts._renderer.template_failures == failures, "no fault of the template"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_client_that_stays_gets_the_same_prompt_and_was_asked_for_in_rendering_and_after(
    name: str,
) -> None:
    prompts, stays = builder(name), Leaving(1_000_000)
    with while_client_waits(stays):
        built = prompts.build(CONTENT)
    assert built.ids == prompts.build(CONTENT).ids
    rendered = Leaving(1_000_000)
    with while_client_waits(rendered):
        prompts._renderer.render(CONTENT.messages, [], {})
    assert rendered.asked >= 50, "once a message or more"
    assert stays.asked > rendered.asked, "tokenising asks too"


def test_two_threads_that_meet_the_same_text_count_it_once() -> None:
    cache, both = PieceCache(10_000, vocab_size=10), threading.Barrier(2)

    def encode() -> list[int]:
        both.wait(60)
        return [7, 8]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: cache.recall("", ("text", True), encode), range(2)))
    alone = PieceCache(10_000, vocab_size=10)
    alone.recall("", ("text", True), lambda: [7, 8])
    assert found == [(7, 8), (7, 8)] and cache.cost == alone.cost
