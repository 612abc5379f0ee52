"""Both ends of the transport over real sockets, in one process: what is told, found and refused."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.errors import EXIT_CANNOT_START, EXIT_RANK_LOST, StartError
from hearth.shared.zmq_rank_port import RankContext, RankDealer
from hearth.worker.ranks import follower_link, leader_link
from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_hosts import RankHost
from hearth.worker.ranks.rank_link import HERE, RankLost, pack

pytestmark = pytest.mark.process

WAIT_S_MAX = 60.0


def wait_until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


class Ranks:
    """Rank 0 and two followers; how each end was told to end the process is in `ends`."""

    def __init__(self, directory: Path, stall_s: float = 0) -> None:
        self.ends: dict[int, tuple[int, str]] = {}
        hosts = [RankHost(("127.0.0.1",))] * 3
        told = {"tensors": {}, "settings": {"dtype": "float16"}, "purpose": "serve"}
        endpoints = (f"ipc://{directory}/a.sock", f"ipc://{directory}/b.sock")
        context = RankContext(None, is_leader=True)
        self.leader = LeaderLink(hosts, stall_s, told, context, endpoints, self.ender(0))
        self.followers: dict[int, FollowerLink] = {}

    def ender(self, rank: int) -> Callable[[int, str], None]:
        return lambda code, why: self.ends.setdefault(rank, (code, why)) and None

    def start(self) -> None:
        threads = [threading.Thread(target=self.join, args=(rank,)) for rank in (1, 2)]
        for thread in threads:
            thread.start()
        self.leader.wait_for_all(lambda: False)
        for thread in threads:
            thread.join()

    def join(self, rank: int | None) -> None:
        context = RankContext(None, is_leader=False)
        link = FollowerLink(context, self.leader.endpoint, "", self.ender(rank or 9))
        try:
            welcome = link.join(rank)
        except StartError:
            link.close()
            raise
        assert rank is not None
        self.followers[rank] = link
        assert (welcome.rank, welcome.settings) == (rank, {"dtype": "float16"})

    def end_of(self, rank: int) -> tuple[int, str]:
        """Wait until this rank was told to end; return with which code and why."""
        wait_until(lambda: rank in self.ends)
        return self.ends[rank]

    def close(self) -> None:
        self.leader.close()
        for follower in self.followers.values():
            follower.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        yield Path(name)


@pytest.fixture
def ranks(directory: Path) -> Iterator[Ranks]:
    made = Ranks(directory)
    made.start()
    yield made
    made.close()


def answering(link: FollowerLink, count: int) -> threading.Thread:
    """Have `link` answer the next `count` operations with its rank and what it was told."""

    def run() -> None:
        for _ in range(count):
            operation = link.next()
            if operation.is_asked:
                link.answer([link.rank, operation.name, operation.arguments, operation.drops])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_all_followers_do_what_is_told_in_order_and_answer_what_is_asked(ranks: Ranks) -> None:
    leader = ranks.leader
    threads = [answering(link, 4) for link in ranks.followers.values()]
    leader.send("new", 1)
    leader.send("prefill", 1, [5, 6])
    assert leader.request("size", "a", drops=[7]) == [
        [1, "size", ["a"], [7]],
        [2, "size", ["a"], [7]],
    ]
    assert [answer[0] for answer in leader.request("again")] == [1, 2]
    for thread in threads:
        thread.join()
    assert ranks.ends == {}


def test_an_event_and_the_memory_of_a_follower_reach_rank_0(ranks: Ranks) -> None:
    heard: list[Any] = []
    ranks.leader.on_event = lambda *event: heard.append(event)
    ranks.followers[2].set_memory(100, 7)
    ranks.followers[2].send_event("read", 5, ["a file"])
    rooms = ranks.leader.rank_memory
    wait_until(lambda: heard and 2 in rooms and rooms[2].used_bytes)
    assert heard == [(2, "read", [5, ["a file"]])]
    assert (rooms[2].limit_bytes, rooms[2].used_bytes) == (100, 7)


def test_ranks_that_computed_different_things_end_at_once_with_both_values(ranks: Ranks) -> None:
    for link in (ranks.leader, *ranks.followers.values()):
        link.witness("step", [1, 2])
    ranks.leader.witness("step", [3])
    ranks.followers[1].witness("step", [3])
    ranks.followers[2].witness("step", [4])
    code, why = ranks.end_of(0)
    assert code == EXIT_RANK_LOST
    assert why.endswith("step 2: rank 0 computes ['step', [3]], rank 2 ['step', [4]]")
    with pytest.raises(RankLost):
        ranks.leader.send("next")


def test_a_follower_that_is_gone_is_noticed(ranks: Ranks) -> None:
    ranks.followers[2].close()
    assert ranks.end_of(0) == (
        EXIT_RANK_LOST,
        "rank 2 of 3 (127.0.0.1) is gone: its connection ended",
    )


def test_followers_notice_that_rank_0_is_gone(ranks: Ranks) -> None:
    ranks.leader.close()
    assert ranks.end_of(1) == ranks.end_of(2) == (EXIT_RANK_LOST, "rank 0 is gone")


def test_a_follower_that_broke_says_so_to_rank_0(ranks: Ranks) -> None:
    ranks.followers[1].fail(KeyError("a number that was never told"))
    assert ranks.end_of(0)[1] == "rank 1 of 3 (127.0.0.1): it broke (KeyError); its log says how"
    assert ranks.end_of(1)[0] == EXIT_RANK_LOST


def test_operations_go_to_no_stranger_who_says_that_it_is_a_rank(directory: Path) -> None:
    ranks, context = Ranks(directory), RankContext(None, is_leader=False)
    stranger = RankDealer(context, ranks.leader.endpoint.replace("a.sock", "b.sock"))
    for frame in (b"garbage", pack([HERE, 1, b"another secret"])):
        stranger.send(frame)
    ranks.start()
    threads = [answering(link, 1) for link in ranks.followers.values()]
    ranks.leader.send("go on")
    for thread in threads:
        thread.join(10)
    told = [not thread.is_alive() for thread in threads]
    stranger.close()
    context.close()
    ranks.close()
    assert told == [True, True]


def test_a_rank_with_another_version_is_refused_with_both_values(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_link, "own_versions", lambda: {"mlx": "0.2"})
    monkeypatch.setattr(follower_link, "own_versions", lambda: {"mlx": "0.1"})
    ranks = Ranks(directory)

    def start() -> None:
        with pytest.raises(SystemExit):
            ranks.leader.wait_for_all(lambda: 0 in ranks.ends)

    starting = threading.Thread(target=start)
    starting.start()
    with pytest.raises(StartError, match=r"its mlx is 0\.1, and rank 0's is 0\.2"):
        ranks.join(1)
    assert ranks.end_of(0) == (
        EXIT_CANNOT_START,
        "rank 1 of 3 (127.0.0.1) cannot take part: its mlx is 0.1, and rank 0's is 0.2. "
        "Install the same on both.",
    )
    starting.join()
    ranks.close()


def test_a_rank_that_nobody_waits_for_is_refused_and_the_others_go_on(ranks: Ranks) -> None:
    with pytest.raises(StartError, match="waits for no rank at this machine"):
        ranks.join(1)
    with pytest.raises(
        StartError, match=r"has .*\. Another address .* hearth ranks join --address"
    ):
        ranks.join(None)
    threads = [answering(ranks.followers[2], 1)]
    ranks.leader.send("go on")
    threads[0].join()
    assert 0 not in ranks.ends


def test_what_a_rank_said_before_it_ended_tells_why(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_link, "LEAVE_WAIT_S", 0.0)
    is_told = threading.Event()
    ranks.leader.on_event = lambda *_: is_told.wait(WAIT_S_MAX) and None  # rank 0 is slow
    ranks.followers[1].send_event("busy")
    ranks.followers[1].fail(StartError("The model needs 9 GB and has 8."))
    ranks.leader.report_lost(1, "it ended with code 78")
    is_told.set()
    assert ranks.end_of(0) == (
        EXIT_CANNOT_START,
        "rank 1 of 3 (127.0.0.1): The model needs 9 GB and has 8.",
    )
