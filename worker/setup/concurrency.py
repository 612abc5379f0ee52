"""Decides how many requests of a worker compute at once, and how many live caches it holds.

Both are bounds on counts. Within them memory decides: a request begins where its KV has room
(worker/schedule/admission_and_disk_recall.py), and an idle live cache stays where it has
(worker/kv/idle_slots.py).
"""

from typing import Final

from hearth.shared.settings_from_env import Settings

BATCHED: Final = 32  # by default, where sequences share forwards: more of them slow each other
LONE: Final = 4  # where each takes a forward of its own, those that come later end no later


def running_max(settings: Settings, is_batched: bool) -> int:
    """Return how many requests may compute at once; `is_batched`: they share forwards.

    Each that computes has a live cache, so never more than LIVE_SLOTS_MAX where that is set.
    """
    wanted = settings.max_concurrent_requests or (BATCHED if is_batched else LONE)
    return min(wanted, settings.live_slots_max or wanted)


def live_slots_max(settings: Settings) -> int:
    """Return how many live caches may be held: one for each that may compute, by default."""
    return settings.live_slots_max or max(BATCHED, settings.max_concurrent_requests)
