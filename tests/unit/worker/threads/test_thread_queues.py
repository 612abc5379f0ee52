"""A prompt of any length in one lane, and short prompts that get past it in another."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import (
    Constraints,
    Count,
    Counted,
    Failed,
    Prompt,
    Sampling,
    Status,
    Submit,
    Up,
)
from hearth.worker.cache.block_hash import pack
from hearth.worker.prompt.awaited_work import raise_if_client_left
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt
from hearth.worker.schedule.request_state import ClientLease, MessageWithImages, RenderNextPrompt
from hearth.worker.threads.prompt_thread import PromptThread
from hearth.worker.threads.request_builder import PromptFacts, SessionPromptBuilder
from hearth.worker.threads.thread_queues import LANE_WEIGHTS, PromptLanes, lane_of

WAIT_S = 60.0
HI = Prompt([{"role": "user", "content": "Hi"}])
LONG = Prompt([{"role": "user", "content": "x" * 3_000_000}])
MANY = Prompt([{"role": "user", "content": "x"}] * 20_000)
SESSION = Prompt([{"role": "user", "content": "x" * 1000}] * 200)
LAST = len(LANE_WEIGHTS) - 1
OBJECT = Constraints(is_json=True)


def submit(prompt: Prompt, constraints: Constraints | None = None) -> Submit:
    return Submit("r", prompt, Sampling(), constraints or Constraints())


@pytest.mark.parametrize(
    ("job", "lane"),
    [
        (submit(HI), 0),
        (Count("c", HI), 0),
        (Status("s", "sessions"), 0),
        (submit(SESSION), 1),
        (submit(HI, OBJECT), 1),  # a grammar may take seconds to compile
        (submit(HI, Constraints(tool_choice="required")), 1),
        (Submit("r", HI, Sampling(), prediction="x" * 1_000_000), 1),
        (submit(LONG), LAST),
        (submit(MANY), LAST),  # little text, and each message may be looked at from each other
        (Count("c", MANY), LAST),
        (MessageWithImages(submit(LONG), {}), LAST),
        (submit(Prompt([], text="x" * 3_000_000)), LAST),
        (submit(Prompt([], ids=[1] * 1_000_000)), LAST),
        (submit(Prompt(HI.messages, tools=[{"a": [0] * 200_000}])), LAST),
        (submit(Prompt(HI.messages, deferred=[{"a": [0] * 200_000}])), LAST),
        (submit(Prompt(HI.messages, template_kwargs={"a": "x" * 100_000})), 1),
        (RenderNextPrompt(cast(Any, SimpleNamespace(ids=[1] * 1_000_000))), LAST),
    ],
)
def test_a_job_goes_to_the_lane_of_the_time_that_it_may_take(job: Any, lane: int) -> None:
    assert lane_of(job) == lane


class LongPrompts:
    """Builds a long prompt until its client leaves or `ends` is set, and a short one at once."""

    facts = cast(PromptFacts, None)

    def __init__(self) -> None:
        self.begun, self.ends = threading.Event(), threading.Event()

    def build(self, prompt: Prompt, *_: Any, **_options: Any) -> tuple[None, BuiltPrompt]:
        while prompt is not HI and not self.ends.wait(0.001):
            self.begun.set()
            raise_if_client_left()
        return None, BuiltPrompt([1], pack([1]), (), 1, frozenset(), 0)


class Desk:
    """Runs the prompt threads over `LongPrompts`, and collects what they send."""

    def __init__(self) -> None:
        self.prompts, self.lanes = LongPrompts(), PromptLanes()
        self.sent: list[Up] = []
        self._has_sent = threading.Condition()
        prompts = cast(SessionPromptBuilder, self.prompts)
        worker = PromptThread(prompts, load_settings({}, None))
        self.threads = [
            threading.Thread(target=worker.run, args=(lane, self._unexpected, self._send))
            for lane in self.lanes.lanes
        ]
        for thread in self.threads:
            thread.start()

    def _unexpected(self, item: Any) -> None:
        raise AssertionError(item)

    def _send(self, message: Up) -> None:
        with self._has_sent:
            self.sent.append(message)
            self._has_sent.notify_all()

    def put(self, request_id: str, prompt: Prompt) -> ClientLease:
        lease = ClientLease(request_id, b"peer")
        lease.lease_until = float("inf")
        self.lanes.put((lease, Count(request_id, prompt)))
        return lease

    def wait_for(self, count: int) -> None:
        with self._has_sent:
            assert self._has_sent.wait_for(lambda: len(self.sent) >= count, WAIT_S), self.sent

    def end(self) -> None:
        self.prompts.ends.set()
        self.lanes.put(None)
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    desk = Desk()
    try:
        desk.put("long", LONG)
        assert desk.prompts.begun.wait(WAIT_S)
        desk.put("short", HI)
        desk.wait_for(1)
        assert desk.sent == [Counted("short", 1)]
    finally:
        desk.end()
    assert desk.sent[1:] == [Counted("long", 1)]


def test_clients_that_send_long_prompts_and_leave_keep_nobody_waiting() -> None:
    """What is in work ends at its next part; what waits behind it never begins."""
    desk = Desk()
    try:
        leases = [desk.put(f"long-{n}", LONG) for n in range(4)]
        assert desk.prompts.begun.wait(WAIT_S)
        for lease in leases:
            lease.is_cancelled = True
        desk.wait_for(4)
        gone = [Failed(f"long-{n}", 499, "client_closed", "The client is gone.") for n in range(4)]
        assert desk.sent == gone
    finally:
        desk.end()
