"""Links ranks within one process, without sockets: for tests of what is told and done."""

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hearth.worker.ranks.follower_link import FollowerLink
from hearth.worker.ranks.leader_link import LeaderLink, WitnessComparison
from hearth.worker.ranks.rank_link import (
    OnEvent,
    Operation,
    RankLost,
    RankMemory,
    RankMismatch,
    Value,
    pack,
    unpack,
)

ANSWER_WAIT_S: Final = 30.0


class LeaderInMemory(LeaderLink):
    """Rank 0's end of `ranks_in_memory`; what its thread would do at a failure, it raises."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.hosts = ["127.0.0.1"] * size
        self.on_event: OnEvent = lambda rank, name, arguments: None
        self.rank_memory: dict[int, RankMemory] = {}
        self.comparison = WitnessComparison(range(1, size))
        self.followers = [FollowerInMemory(self, rank) for rank in range(1, size)]

    def send(
        self, name: str, *arguments: Value, drops: Sequence[int] = (), is_asked: bool = False
    ) -> None:
        self.check()
        frame = pack([name, arguments, drops, is_asked])
        for follower in self.followers:
            follower.told.put(frame)

    def request(self, name: str, *arguments: Value, drops: Sequence[int] = ()) -> list[Any]:
        self.send(name, *arguments, drops=drops, is_asked=True)
        return [unpack(each.answers.get(timeout=ANSWER_WAIT_S)) for each in self.followers]

    def witness(self, *facts: Value) -> None:
        self.comparison.record_own(pack(facts))
        self.check()

    def let_go(self) -> None:
        """Do nothing: threads of this process are not lost."""

    def wait_for_failure(self) -> None:
        """Do nothing: what failed is raised."""

    def check(self) -> None:
        """Compare what was witnessed by now. Raises: RankMismatch."""
        for follower in self.followers:
            while follower.facts:
                self.comparison.record(follower.rank, follower.facts.popleft())
            self.comparison.compare(follower.rank)

    def check_all_said(self) -> None:
        """Check that every follower has witnessed all that the leader has. Raises: RankMismatch."""
        self.check()
        for rank in self.comparison.counts:
            said, own = self.comparison.witnessed_count(rank), self.comparison.own_count
            if said != own:
                raise RankMismatch(f"rank {rank} witnessed {said} facts and rank 0 {own}")


class FollowerInMemory(FollowerLink):
    """A follower's end. Its `next` raises RankLost once the leader has closed it with `end`."""

    def __init__(self, leader: LeaderInMemory, rank: int) -> None:
        self.rank, self.size = rank, leader.size
        self.told: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.facts: deque[bytes] = deque()
        self._leader = leader

    def next(self) -> Operation:
        frame = self.told.get()
        if frame is None:
            raise RankLost("rank 0 is gone")
        return Operation(*unpack(frame))

    def end(self) -> None:
        """Have `next` raise RankLost after what was told. Any thread."""
        self.told.put(None)

    def answer(self, value: Value) -> None:
        self.answers.put(pack(value))

    def witness(self, *facts: Value) -> None:
        self.facts.append(pack(facts))

    def send_event(self, name: str, *arguments: Value) -> None:
        self._leader.on_event(self.rank, name, unpack(pack(arguments)))

    def set_memory(self, limit_bytes: int, used_bytes: int) -> None:
        self._leader.rank_memory[self.rank] = RankMemory(limit_bytes, used_bytes)


def ranks_in_memory(size: int) -> tuple[LeaderInMemory, Mapping[int, FollowerInMemory]]:
    """Return the ends of ranks 0 to `size` - 1."""
    leader = LeaderInMemory(size)
    return leader, {follower.rank: follower for follower in leader.followers}
