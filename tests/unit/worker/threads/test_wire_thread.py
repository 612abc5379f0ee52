"""The wire thread's table of open requests, with a scripted port."""

import queue
from collections.abc import Sequence

import pytest

from hearth.shared.suspending_clock import SuspendingClock
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Cancel,
    Count,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Progress,
    Prompt,
    Renew,
    Sampling,
    Submit,
    Usage,
    Welcome,
)
from hearth.shared.zmq_transport import LEASE_S
from hearth.worker.schedule import client_lease
from hearth.worker.threads.thread_queues import PromptJobs
from hearth.worker.threads.wire_thread import WireThread

PROMPT = Prompt([{"role": "user", "content": "x"}])


class ScriptedPort:
    def __init__(self) -> None:
        self.arriving: list[tuple[bytes, Message]] = []
        self.posted: list[tuple[bytes, Message]] = []
        self.gone: set[bytes] = set()

    def post(self, peer: bytes, message: Message) -> None:
        self.posted.append((peer, message))

    def poll(self, wait_s: float) -> list[tuple[bytes, Message]]:
        arrived, self.arriving = self.arriving, []
        return arrived


class Desk:
    """A wire thread with everything around it scripted."""

    def __init__(self, open_max: int = 3) -> None:
        self.port = ScriptedPort()
        self.jobs: PromptJobs = queue.SimpleQueue()
        self.state = "ready"
        self.wire = WireThread(
            self.port,  # type: ignore[arg-type]
            7,
            self.jobs,
            self.heartbeat,
            open_max,
        )

    def heartbeat(self, arriving: Sequence[str]) -> Heartbeat:
        """One request runs; those that are rendered wait, each for half a minute more."""
        wait_s = 29.5 * len(arriving)
        return Heartbeat(self.state, 1, len(arriving), 0, 0, None, wait_s, list(arriving))

    def hear(self, *messages: Message, peer: bytes = b"p") -> None:
        for message in messages:
            self.wire.handle(peer, message)

    def said(self) -> list[Message]:
        posted, self.port.posted = self.port.posted, []
        return [message for _, message in posted]


def submit(name: str) -> Submit:
    return Submit(name, PROMPT, Sampling())


def finished(name: str) -> Finished:
    return Finished(name, "stop", None, Usage(1, 0, 1, 1))


def test_hello_is_answered_with_who_we_are() -> None:
    desk = Desk()
    desk.hear(Hello(PROTOCOL_VERSION))
    welcome, beat = desk.said()
    assert isinstance(welcome, Welcome) and welcome.worker_id == 7 and welcome.boot_id
    assert isinstance(beat, Heartbeat) and beat.requests_max == desk.wire.open_max


def test_an_answer_goes_to_the_peer_that_asked_and_only_once() -> None:
    desk = Desk()
    desk.hear(submit("a"), peer=b"one")
    desk.hear(submit("b"), peer=b"two")
    desk.wire.send(finished("b"))
    desk.wire.send(finished("b"))
    assert desk.port.posted == [(b"two", finished("b"))]


def test_a_worker_that_ends_gives_each_request_one_end_and_takes_no_other() -> None:
    desk = Desk()
    desk.hear(submit("a"), submit("b"))
    desk.wire.send(finished("b"))
    desk.said()
    desk.wire.end_requests(sends_failures=True)
    desk.wire.send(finished("a"))
    desk.hear(submit("c"))
    ends = desk.said()
    assert [(each.request_id, each.code) for each in ends if isinstance(each, Failed)] == [
        ("a", "overloaded"),
        ("c", "overloaded"),
    ]
    assert len(ends) == 2


def test_a_worker_that_broke_leaves_its_requests_to_their_end_with_the_process() -> None:
    desk = Desk()
    desk.hear(submit("a"))
    desk.wire.end_requests(sends_failures=False)
    assert desk.said() == [], "no other worker is to get what may have broken this one"
    assert refusal(desk, submit("b")).request_id == "b"


def refusal(desk: Desk, message: Message, peer: bytes = b"p") -> Failed:
    desk.hear(message, peer=peer)
    (failed,) = desk.said()
    assert isinstance(failed, Failed)
    return failed


def test_requests_past_the_limit_are_refused_and_a_finished_one_makes_room() -> None:
    """Who is there is told, and how long one more would wait."""
    desk = Desk(open_max=2)
    desk.hear(submit("a"), submit("b"))
    failed = refusal(desk, submit("c"))
    assert (failed.request_id, failed.status, failed.code) == ("c", 503, "overloaded")
    assert failed.retry_after_s == 59
    for part in ("2 requests", "1 run, 2 wait", "about 59 s", "QUEUE_MAX"):
        assert part in failed.text
    desk.wire.send(finished("a"))
    desk.said()
    desk.hear(submit("c"))
    assert desk.said() == []


def test_nobody_is_told_to_stay_away_longer_than_clients_heed() -> None:
    desk = Desk(open_max=50)
    desk.hear(*(submit(f"r{number}") for number in range(50)))
    failed = refusal(desk, submit("r50"))
    assert failed.retry_after_s == 60 and "about 1,475 s" in failed.text
    for number in range(50):
        desk.wire.send(Progress(f"r{number}", 0, 9))
    desk.said()
    failed = refusal(desk, submit("soon"))
    assert failed.retry_after_s == 1, "there is no wait any more, and no zero for a loop"


def test_a_request_is_told_as_waiting_while_it_is_rendered() -> None:
    """From its Submit on, until the scheduler, which then counts it, has said its first word."""
    desk = Desk(open_max=9)
    desk.hear(submit("a"), submit("b"), submit("refused"), Count("n", PROMPT))
    desk.wire.send(Failed("refused", 400, "context_length_exceeded", "Too long."))
    desk.hear(Hello(PROTOCOL_VERSION))
    _, beat = desk.said()[-2:]
    assert isinstance(beat, Heartbeat) and beat.queue == ["a", "b"]
    desk.wire.send(Progress("a", 0, 9))
    desk.hear(Hello(PROTOCOL_VERSION))
    beat = desk.said()[-1]
    assert isinstance(beat, Heartbeat) and beat.queue == ["b"]


def test_a_loading_model_refuses_with_503() -> None:
    desk = Desk()
    desk.state = "loading"
    desk.hear(submit("a"), Count("n", PROMPT))
    codes = [(m.status, m.code) for m in desk.said() if isinstance(m, Failed)]
    assert codes == [(503, "model_loading")] * 2


def test_an_id_in_use_is_refused_without_harm_to_its_owner() -> None:
    desk = Desk()
    desk.hear(submit("a"))
    assert refusal(desk, submit("a"), peer=b"other").code == "duplicate_request"
    desk.wire.send(finished("a"))
    assert desk.port.posted == [(b"p", finished("a"))]


def test_cancel_and_a_peer_that_left_mark_the_ticket() -> None:
    desk = Desk()
    desk.hear(submit("a"), submit("b"), Cancel("a"), Cancel("unknown"))
    desk.hear(submit("c"), peer=b"other")
    leases = [desk.jobs.get()[0] for _ in range(3)]
    assert [lease.is_gone for lease in leases] == [True, False, False]
    desk.port.gone.add(b"p")
    desk.wire.forget_gone_peers()
    assert [lease.is_gone for lease in leases] == [True, True, False], "others stay"


@pytest.mark.parametrize("jumps", [False, True], ids=["the clock stands still", "it goes on"])
def test_a_lease_lasts_while_it_is_renewed_and_is_not_over_because_the_machine_has_slept(
    jumps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(client_lease, "awake_s", SuspendingClock(lambda: now).now)
    desk = Desk()
    desk.hear(submit("a"))
    lease, _ = desk.jobs.get()
    now += 8 * 3600 * jumps
    assert not lease.is_gone, "nobody could renew it"
    now += LEASE_S - 0.1
    desk.hear(Renew(["a", "unknown"]))
    now += LEASE_S - 0.1
    assert not lease.is_gone
    now += 0.2
    assert lease.is_gone, "but nobody does once it is awake"


def test_a_message_with_images_goes_to_the_image_thread_where_there_is_one() -> None:
    desk = Desk(open_max=9)
    shows = Prompt([], images={"digest": b"file"})
    desk.hear(Submit("text model", shows, Sampling()))
    desk.wire.image_jobs = image_jobs = queue.SimpleQueue()
    desk.hear(submit("words"), Submit("image", shows, Sampling()), Count("count", shows))
    assert [image_jobs.get()[1].request_id for _ in range(2)] == ["image", "count"]
    assert [desk.jobs.get()[0].request_id for _ in range(2)] == ["text model", "words"]
    assert image_jobs.empty() and desk.jobs.empty()
