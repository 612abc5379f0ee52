"""The prompt thread: every message gets one answer, in order, and a Submit goes on as a Request."""

import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hearth.shared.errors import RequestError
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import (
    Admitted,
    Count,
    Counted,
    Failed,
    Prompt,
    Sampling,
    Status,
    Submit,
    TokenQuery,
    Told,
    Up,
)
from hearth.worker.cache.block_hash import PrefixHash, pack
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt
from hearth.worker.schedule.request_state import (
    ClientLease,
    MessageWithImages,
    RenderNextPrompt,
    Request,
)
from hearth.worker.threads import prompt_thread
from hearth.worker.threads.prompt_thread import PromptThread
from hearth.worker.threads.request_builder import PromptFacts, SessionPromptBuilder
from hearth.worker.threads.thread_queues import PromptJob, PromptJobs

IDS = [1, 2, 3]
RAW = Prompt([], ids=IDS)
FACTS = PromptFacts(
    context_tokens=10,
    vocab_size=100,
    root=PrefixHash(b"root"),
    output_format=cast(Any, None),  # a raw prompt's answer is not taken apart
    grammar_compiler=cast(Any, None),
    vocabulary=cast(Any, SimpleNamespace(detokeniser=lambda behind: None)),
    cut_rule=cast(
        Any, SimpleNamespace(cuts=lambda keys: [len(keys) - 1], system_end=lambda _keys: 0)
    ),
)


class ScriptedPrompts:
    """Builds every prompt of the same tokens; a prompt of too many messages is refused."""

    sessions = SimpleNamespace(
        new_id=lambda: "id",
        new_number=lambda: 1,
        session_rows=lambda key: [key],
    )

    facts = FACTS

    def __init__(self) -> None:
        self.images: list[Any] = []

    def raw_ids(self, prompt: Prompt, _query: TokenQuery) -> list[int]:
        return prompt.ids

    def build(self, prompt: Prompt, images: Any, *_: Any, **_options: Any) -> tuple[None, Any]:
        self.images.append(images)
        if prompt.messages == ["a bug"]:
            raise IndexError("of its own")
        if prompt.messages:
            raise RequestError("Too long.", code="context_length_exceeded")
        return None, BuiltPrompt(IDS, pack(IDS), (), len(IDS), frozenset(), 0)


def run(
    *jobs: tuple[ClientLease, PromptJob],
    look: Callable[[], threading.Event | None] = lambda: None,
) -> tuple[list[Any], list[Up], ScriptedPrompts]:
    """Return what went on to the inference thread, and what was sent."""
    todo: PromptJobs = queue.SimpleQueue()
    for job in (*jobs, None):
        todo.put(job)
    went_on: list[Any] = []
    sent: list[Up] = []
    prompts = ScriptedPrompts()
    settings = load_settings({}, None)
    thread = PromptThread(cast(SessionPromptBuilder, prompts), settings, None, look)
    thread.run(todo, went_on.append, sent.append)
    return went_on, sent, prompts


def job(message: Submit | Count | Status | MessageWithImages) -> tuple[ClientLease, PromptJob]:
    inner = message.message if isinstance(message, MessageWithImages) else message
    return ClientLease(inner.request_id, b"peer"), message


def test_a_submit_is_admitted_before_it_goes_on_and_every_other_message_is_answered() -> None:
    went_on, sent, _ = run(
        job(Submit("s", RAW, Sampling(max_tokens=50))),
        job(Count("c", RAW)),
        job(Status("q", "sessions", key="k")),
        job(Status("u", "prompt", "r9")),
    )
    assert sent[:3] == [
        Admitted("s", 3, "hearth-id"),
        Counted("c", 3),
        Told("q", {"sessions": ["k"]}),
    ]
    assert isinstance(sent[3], Failed) and (sent[3].status, sent[3].code) == (404, "not_found")
    (request,) = went_on
    assert isinstance(request, Request)
    assert (request.ids, request.query.cuts, request.tokens_max) == (IDS, [2], 7)


class Look(threading.Event):
    """A look at the disk that ends once somebody waits for it."""

    def wait(self, timeout: float | None = None) -> bool:
        self.set()
        return True


def test_a_prompt_goes_on_once_the_disk_was_looked_at_and_one_that_keeps_nothing_at_once() -> None:
    looks: list[Look] = []

    def look() -> Look:
        looks.append(Look())
        return looks[-1]

    uncached = Submit("u", RAW, Sampling(), use_kv_cache=False)
    run(job(uncached), job(Count("c", RAW)), look=look)
    assert not looks
    went_on, _, _ = run(job(Submit("s", RAW, Sampling())), look=look)
    assert len(went_on) == len(looks) == 1 and looks[0].is_set()


def test_a_prompt_waits_for_no_disk_that_is_amid_something_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_thread, "LOOK_WAIT_S_MAX", 0.01)
    went_on, sent, _ = run(job(Submit("s", RAW, Sampling())), look=threading.Event)
    assert len(went_on) == 1 and isinstance(sent[0], Admitted)


@pytest.mark.parametrize(
    ("message", "status", "code", "text"),
    [
        ({}, 400, "context_length_exceeded", "Too long."),
        ("a bug", 500, "internal_error", ""),
    ],
)
def test_a_prompt_that_is_refused_or_that_a_bug_breaks_ends_its_request_alone(
    message: Any, status: int, code: str, text: str
) -> None:
    bad = Prompt([message], ids=[])
    went_on, sent, _ = run(
        job(Submit("bad", bad, Sampling())),
        job(Count("bad too", bad)),
        job(Submit("fine", RAW, Sampling())),
    )
    failures = [(each.request_id, each.status, each.code) for each in sent[:2]]  # type: ignore[union-attr]
    assert failures == [("bad", status, code), ("bad too", status, code)]
    assert sent[2:] == [Admitted("fine", 3, "hearth-id")]
    assert [request.request_id for request in went_on] == ["fine"]
    assert text in str(sent) and "of its own" not in str(sent)


def test_nothing_is_rendered_for_a_client_that_is_gone() -> None:
    gone = job(Submit("s", RAW, Sampling()))
    gone[0].is_cancelled = True
    went_on, sent, prompts = run(gone)
    assert sent == [Failed("s", 499, "client_closed", "The client is gone.")]
    assert (went_on, prompts.images) == ([], [])


def test_images_that_were_read_reach_the_prompt_and_its_request() -> None:
    images = cast(Any, {"digest": "image"})
    went_on, _, prompts = run(job(MessageWithImages(Submit("s", RAW, Sampling()), images)))
    assert prompts.images == [images] and len(went_on) == 1


def test_a_request_without_a_session_has_no_next_prompt() -> None:
    request = run(job(Submit("s", RAW, Sampling())))[0][0]
    went_on, sent, _ = run((request.lease, RenderNextPrompt(request)))
    assert (went_on, sent) == ([], [])
