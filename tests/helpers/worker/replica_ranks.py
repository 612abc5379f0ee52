"""Leads followers that have the whole model, each in a thread: what is told is all that is tested.

No sum is computed: a follower takes the tokens of rank 0 from a queue.
"""

import queue
import threading
from typing import Any

import mlx.core as mx

from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.ranks.follower import Follower
from hearth.worker.ranks.leading_rank import LeadingRank
from hearth.worker.ranks.rank_link import RankLost
from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts, DraftPolicy
from scripts.harness.ranks.ranks_in_memory import FollowerInMemory, ranks_in_memory
from scripts.harness.socketless_worker import Machine, marks, vocabulary

WAIT_S = 30.0
LIMIT_BYTES = 1 << 40


class RoomyMemory:
    """A machine on which a follower may take all that it wants."""

    def room(self) -> tuple[int, int]:
        return LIMIT_BYTES, 0

    def measure(self) -> None:
        pass


class ReplicaFollower:
    """One follower, and the error that ended it, if any did."""

    def __init__(self, link: FollowerInMemory, model: LoadedModel) -> None:
        self.added = 0  # to each token of rank 0
        self.tokens: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self.error: Exception | None = None
        self.follower = Follower(link, lambda: model, self._sum, RoomyMemory(), lambda *_: None)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _sum(self, nothing: mx.array) -> mx.array:
        chosen = mx.array(self.tokens.get(timeout=WAIT_S), mx.uint32)
        return chosen + nothing + self.added

    def _run(self) -> None:
        try:
            self.follower.run()
        except RankLost:
            pass
        except Exception as error:
            self.error = error
        finally:
            mx.synchronize()
            mx.clear_streams()


class ReplicaRanks(LeadingRank):
    """Rank 0, whose followers compute the same as it does, and not a part."""

    def __init__(self, model: LoadedModel, size: int = 2) -> None:
        self.link, ends = ranks_in_memory(size)
        super().__init__(self.link, None, "tensor")  # type: ignore[arg-type]
        self._total = self._tell_tokens
        self.followers = [ReplicaFollower(end, model) for end in ends.values()]
        self.telling.tell("load")

    def _tell_tokens(self, tokens: mx.array) -> mx.array:
        ids: list[int] = tokens.tolist()  # type: ignore[assignment]
        for follower in self.followers:
            follower.tokens.put(ids)
        return tokens + max(follower.added for follower in self.followers)

    def settle(self) -> None:
        """Wait until the followers have done all that was told; raise what ended one."""
        self.telling.ask("loaded")
        for follower in self.followers:
            if follower.error is not None:
                raise follower.error
        self.link.check_all_said()

    def close(self) -> None:
        for end in self.link.followers:
            end.end()
        for follower in self.followers:
            follower.thread.join(WAIT_S)
            assert not follower.thread.is_alive(), "a follower waits for something"


def ranked_machine(name: str, ranks: ReplicaRanks, model: LoadedModel, **more: Any) -> Machine:
    """Return a worker without sockets whose model the followers compute too."""
    return Machine(model, marks(name), vocabulary(name), rank=ranks, drafts=no_drafts(), **more)


def no_drafts() -> AnswerDrafts:
    return AnswerDrafts(DraftPolicy("off", "none", "none"))
