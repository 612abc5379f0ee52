"""Orders waiting requests: sessions take turns, so that none waits for another's whole queue."""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from hearth.worker.schedule.request_state import Request


def in_turn(waiting: Iterable[Request], turn: int) -> Iterator[Request]:
    """Yield `waiting`, which is in the order of arrival, in the order in which slots go to it.

    `turn` is how many slots have been given. The asker whose last one is the longest ago is next,
    with its oldest request; one that comes anew comes as if it had been given a slot just then.
    So each asker has one slot at most between its arrival and its turn, and nobody is overtaken
    for ever.
    """
    queues: dict[str, deque[tuple[int, Request]]] = {}
    for number, each in enumerate(waiting):
        queues.setdefault(each.asker, deque()).append((number, each))
    heads = [(queue[0][1].turn, queue[0][0], queue) for queue in queues.values()]
    heapq.heapify(heads)
    while heads:
        _, _, queue = heapq.heappop(heads)
        _, each = queue.popleft()
        turn += 1
        if queue:
            heapq.heappush(heads, (max(turn, queue[0][1].turn), queue[0][0], queue))
        yield each


def give_turn(to: Request, waiting: Iterable[Request], turn: int) -> int:
    """Note that `to` was given a slot, and return how many have been given now."""
    assert to.turn <= turn, (to.turn, turn)
    for each in waiting:
        if each.asker == to.asker:
            each.turn = turn + 1
    return turn + 1
