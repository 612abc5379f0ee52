"""Leads random conversations whose messages show images."""

import random

from hearth.worker.cache.block_hash import pack
from hearth.worker.cache.image_keys import image_borders
from scripts.harness.vision_worker import SIZES, shown
from scripts.harness.warm.warm_talks import Talk


class LookingTalk(Talk):
    """Conversations whose messages may show images, before, amid and behind their words."""

    def words(self, chance: random.Random, count: int) -> list[int]:
        words = super().words(chance, count)
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            at = chance.randrange(len(words) + 1)
            if not any(key < 0 for key in words[at : at + 1]):
                words[at:at] = shown(self.fixture, chance.randrange(2 * len(SIZES)))
        return words

    def whole(self, ids: list[int]) -> list[int]:
        """Return a beginning of a prompt without the image that it breaks off in."""
        starts, _ = image_borders(pack(ids))
        if starts and len(ids) - starts[-1] < len(self._at(ids[starts[-1]])):
            return ids[: starts[-1]]
        return ids

    def _at(self, first: int) -> tuple[int, ...]:
        numbers = range(2 * len(SIZES))
        return next(s for s in (shown(self.fixture, n) for n in numbers) if s[0] == first)
