"""Leads followers that have the whole model, each in a thread: what is told is all that is tested.

No sum is computed: a follower takes the tokens of rank 0 from a queue.
"""

import gc
import queue
import threading
from typing import Any

import mlx.core as mx

from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.layer_kinds.kinds import leaves
from hearth.worker.ranks.follower_main import Follower, FollowerMemory
from hearth.worker.ranks.leading_kv import EMPTY_HANDLE, handle_of
from hearth.worker.ranks.leading_rank import LeadingRank
from hearth.worker.ranks.rank_link import RankLost
from hearth.worker.schedule.answer_drafts import AnswerDrafts, DraftPolicy
from scripts.harness.ranks.ranks_in_memory import FollowerInMemory, ranks_in_memory
from scripts.harness.socketless_worker import Machine, marks, vocabulary

WAIT_S = 30.0
LIMIT_BYTES = 1 << 40


class RoomyMemory(FollowerMemory):
    """A machine on which a follower may take all that it wants."""

    def __init__(self) -> None:
        """Look at nothing."""

    def limit_and_use(self) -> tuple[int, int]:
        return LIMIT_BYTES, 0

    def measure(self, *, is_due: bool = False) -> None:
        pass


class ReplicaFollower:
    """One follower, and the error that ended it, if any did."""

    def __init__(self, link: FollowerInMemory, model: LoadedModel) -> None:
        self.added = 0  # to each token of rank 0
        self.tokens: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        self.error: Exception | None = None
        memory = RoomyMemory()
        self.follower = Follower(link, lambda: model, self._sum, memory, lambda *_: None)
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
            self.follower.disk.close()
            mx.synchronize()
            mx.clear_streams()


class ReplicaRanks(LeadingRank):
    """Rank 0, whose followers compute the same as it does, and not a part."""

    def __init__(self, model: LoadedModel) -> None:
        self.link, ends = ranks_in_memory(2)
        super().__init__(self.link, None, "tensor")  # type: ignore[arg-type]
        self._total = self._tell_tokens
        self.followers = [ReplicaFollower(end, model) for end in ends.values()]
        self.commands.send("load")

    def _tell_tokens(self, tokens: mx.array) -> mx.array:
        ids: list[int] = tokens.tolist()  # type: ignore[assignment]
        for follower in self.followers:
            follower.tokens.put(ids)
        return tokens + max(follower.added for follower in self.followers)

    def settle(self) -> None:
        """Wait until the followers have done all that was told; raise what ended one."""
        self.commands.request("loaded")
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


def arrays_of(cache: list[Any]) -> list[mx.array]:
    """Return what the layers hold, as far as it is written."""
    found: list[mx.array] = []
    for leaf in leaves(cache):
        states = getattr(leaf, "cache", None)
        if states is not None:
            found += [array for array in states if array is not None]
        elif leaf.keys is not None:
            found += [leaf.keys[..., : leaf.offset, :], leaf.values[..., : leaf.offset, :]]
    return found


def same(own: list[mx.array], theirs: list[mx.array]) -> bool:
    return len(own) == len(theirs) and all(
        bool(mx.array_equal(a, b)) for a, b in zip(own, theirs, strict=True)
    )


def check_followed(worker: Machine, ranks: ReplicaRanks) -> None:
    """Assert that each follower holds, to the bit, what rank 0 holds, and nothing else."""
    keeper = worker.keeper
    worker.answers.clear()  # whose requests know what they went on from
    gc.collect()
    ranks.settle()  # with which is told what has gone
    slots = [slot.cache for slot in keeper.slots if slot.cache]
    rows = [part for e in keeper.store.extents for part in (e.body, e.window) if part is not None]
    states = [node.snapshot for node in keeper.store.nodes if node.snapshot is not None]
    for follower in ranks.followers:
        kv = follower.follower.kv
        assert kv.caches.keys() == {handle_of(cache) for cache in slots}
        assert kv.rows.keys() == {EMPTY_HANDLE, *map(handle_of, rows)}
        assert kv.states.keys() == {EMPTY_HANDLE, *map(handle_of, states)}
        for cache in slots:
            assert same(arrays_of(cache), arrays_of(kv.caches[handle_of(cache)]))
        for part in rows:
            own = [a for layer in part.layers for a in layer.arrays]
            theirs = [a for layer in kv.rows[handle_of(part)].layers for a in layer.arrays]
            assert same(own, theirs)
        for state in states:
            own = [a for layer in state.layers for a in layer if a is not None]
            theirs = [
                a for layer in kv.states[handle_of(state)].layers for a in layer if a is not None
            ]
            assert same(own, theirs)
