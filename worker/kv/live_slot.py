"""Describes live slots: the contiguous caches that sequences run in, and what each holds now."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hearth.worker.cache.block_hash import Tokens
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.extent_store import Extent, Joint
from hearth.worker.cache.image_keys import ImageRun
from hearth.worker.cache.resume_planner import SlotView
from hearth.worker.kv.quantise_kv import QuantFormat


@dataclass(eq=False, slots=True)
class LiveSlot:
    """One live cache.

    Invariants: the layers hold exactly `tokens`; `held_extents` are extents along `tokens` whose
    rows are this slot's; its KV is canonical up to `canonical_to`.
    Owner: the inference thread.
    """

    number: int
    cache: list[Any]  # empty while its rows are in a batch, or in no one's
    joint: Joint  # the furthest prefix of `tokens` that is in the store; a root at first
    line: LinePriority | None = None
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    images: tuple[ImageRun, ...] = ()  # of the prompt that it was opened for, bare
    canonical_cuts: list[int] = field(default_factory=list)  # of its canonical prefill
    held_extents: list[Extent] = field(default_factory=list)
    lent_extents: list[Extent] = field(default_factory=list)  # held before it joined a batch
    floor: int = 0  # it cannot be taken back further than this
    is_busy: bool = True
    is_spare: bool = False  # filled by idle work: the first to be given away
    is_settled: bool = False  # idle work has nothing left to do for it
    idle_prefilled_to: int = 0  # its tokens up to here were prefilled in idle time once
    capacity: int = 0  # tokens that fit without a copy
    format: QuantFormat | None = None  # of its rows
    adapter: str = ""  # that its rows were computed with, as its root's queries say
    used_at: float = 0.0
    system_end: int = 0  # of the prompt that it was opened for ...
    cuts: Sequence[int] = ()  # ... and where its reading is cut, the last time at its end
    cold_point: Joint | None = None  # amid its reading, on disk in case the worker is killed
    root: Joint = field(init=False)  # what the names of its prefixes begin with

    def __post_init__(self) -> None:
        self.root = self.joint

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def canonical_to(self) -> int:
        return self.canonical_cuts[-1] if self.canonical_cuts else 0

    @property
    def is_canonical(self) -> bool:
        """Whether a prefill of its tokens would have written the very same."""
        return self.position == self.canonical_to

    def view(self) -> SlotView:
        cuts = tuple(self.canonical_cuts)
        return SlotView(self.number, self.tokens, cuts, self.floor, self.root.name)
