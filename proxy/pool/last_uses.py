"""Remembers when a model was last used, by one key and by all others: whose wish may unload it."""

from typing import Final

from hearth.shared.suspending_clock import awake_s

OTHERS_KEEP_S: Final = 300.0  # what Ollama keeps a model for after each use


class LastUses:
    """When requests last began or ended, by who asked. Owner: the event loop.

    Two times are enough for every key: all before the last key's turn are others' than it.
    """

    def __init__(self) -> None:
        self.at = 0.0  # the last one (`awake_s`); 0.0 = never
        self._key = ""  # whose that was
        self._before = 0.0  # the last one of another key than that

    def note(self, key: str) -> None:
        """A request of `key` begins or ends."""
        if key != self._key:
            self._key, self._before = key, self.at
        self.at = awake_s()

    def is_kept_for_others(self, key: str) -> bool:
        """Return whether another key than `key` has used the model a short while ago."""
        last = self._before if key == self._key else self.at
        return last > 0.0 and awake_s() - last < OTHERS_KEEP_S
