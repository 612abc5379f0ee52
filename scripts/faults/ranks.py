"""Plays random operations on a model over ranks and compares every answer with a cold one.

An episode is a fixture, exact mode or not, ample room or hardly any, with files or without, and
some operations: turns, edits, branches, several at once, cancels amid prefill and answer, a cache
that is emptied amid either. With files all ranks then forget all but these, of which some of one
rank may be gone or garbled, and every prompt is asked again. Exact answers are a cold cache's to
the bit, others to the token; all are what one rank says, but where its two best tokens are a tie.
With --plant one operation is spoiled, which must be found within 2 s. What ends ranks is played by
`chaos --ranks 2`.
"""

import argparse
import faulthandler
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from hearth.shared.settings import load_settings
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures.fixture_cache import RANKED_NAMES, fixture_dir
from scripts.harness.ranks.planted_link import PlantedLink
from scripts.harness.ranks.ranked_models import RankedModels
from scripts.harness.socketless_worker import Machine
from scripts.harness.warm.token_margins import same_tokens
from scripts.harness.warm.warm_talks import (
    OPERATION_NAMES,
    OPERATIONS_MAX,
    OPERATIONS_MIN,
    SEED_MAX,
    TOKENS_MAX,
    Talk,
    play,
)

HANG_S_MAX: Final = 240.0  # of an episode, or the end behind it: who waits so long waits for ever


@dataclass(frozen=True, slots=True)
class Episode:
    """What is done on a freshly loaded model."""

    fixture: str
    operations: list[tuple[str, int]]
    is_exact: bool = True
    slots_max: int = 4
    budget_kb: int | None = None  # None = ample
    has_files: bool = False
    spoilt: str = ""  # what befalls files of one rank before they are read: "missing" | "garbled"


def random_episode(seed: int) -> Episode:
    chance = random.Random(seed)
    is_tight = chance.random() < 0.4
    return Episode(
        RANKED_NAMES[seed % len(RANKED_NAMES)],
        [
            (chance.choice(OPERATION_NAMES), chance.randrange(SEED_MAX))
            for _ in range(chance.randint(OPERATIONS_MIN, OPERATIONS_MAX))
        ],
        chance.random() < 0.5,
        chance.randint(1, 3) if is_tight else 4,
        chance.choice((0, 400, 1500)) if is_tight else None,
        chance.random() < 0.6,
        chance.choice(("", "", "missing", "garbled")),
    )


@dataclass(slots=True)
class Episodes:
    """Plays episodes on one set of ranks. Owner: the thread that computes."""

    ranks: RankedModels
    counts: Counter[str] = field(default_factory=Counter)

    def play(self, episode: Episode, *, adds_noise: bool = False) -> None:
        """Do an episode. Raises: AssertionError, where an answer differs."""
        faulthandler.dump_traceback_later(HANG_S_MAX, exit=True)
        talk = self._talk(episode, adds_noise)
        play(talk, episode.operations, episode.is_exact, is_ample=episode.budget_kb is None)
        self._count(talk, episode)
        if episode.has_files:
            assert self.ranks.flush(30.0), "files were not written in time"
            self._spoil(episode)
            again = self._talk(episode, adds_noise)
            for prompt in talk.prompts:
                self.counts["tokens read back"] += again.ask(prompt, episode.is_exact).cached
            self._count(again, episode)
        self.counts["episodes"] += 1

    def _spoil(self, episode: Episode) -> None:
        """Have some files of one rank be gone, or hold something else."""
        chance = random.Random(str(episode.operations))
        files = self.ranks.files_of(chance.randrange(self.ranks.size)) if episode.spoilt else []
        for file in chance.sample(files, (len(files) + 1) // 2):
            self.counts[f"files {episode.spoilt}"] += 1
            if episode.spoilt == "missing":
                file.unlink()
            else:
                raw = bytearray(file.read_bytes())
                raw[chance.randrange(len(raw))] ^= 0xFF
                file.write_bytes(raw)

    def _talk(self, episode: Episode, adds_noise: bool) -> Talk:
        loaded = self.ranks.load(fixture_dir(episode.fixture, ranked=True), adds_noise=adds_noise)
        engine = self.ranks.engine(loaded, is_exact=episode.is_exact)
        # Of its own: what an earlier episode's files lack was not read in this one.
        root = root_hash([episode.fixture, str(self.counts["episodes"])])
        rules: dict[str, Any] = {"is_exact": episode.is_exact, "engine": engine, "root": root}
        cold = self.ranks.machine(loaded, keeps=False, **rules)
        warm = self.ranks.machine(
            loaded,
            slots_max=episode.slots_max,
            budget_mb=512 if episode.budget_kb is None else episode.budget_kb / 1024,
            disk_thread=self.ranks.disk_thread(root) if episode.has_files else None,
            **rules,
        )
        return Talk(loaded, warm, cold)

    def _count(self, talk: Talk, episode: Episode) -> None:
        """Count what was asked; hold what the ranks say of a cold cache to what one rank says."""
        self.counts["prompts warm"] += len(talk.prefilled)
        loaded = lone_model(talk.directory)
        marks, vocabulary = turn_marks(loaded.tokenizer), Vocabulary(loaded.tokenizer)
        lone = Machine(loaded, marks, vocabulary, keeps=False, is_exact=episode.is_exact)
        for prompt, cold in talk.cold_answers.items():
            alone = lone.ask(list(prompt), TOKENS_MAX)
            self.counts["prompts cold"] += 1
            self.counts["as one rank says"] += alone.tokens == cold.tokens
            same_tokens(cold, alone)


@cache
def lone_model(directory: Path) -> LoadedModel:
    return load_model(load_settings({"MODEL_PATH": str(directory)}, None))


def ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Play episodes until their number is reached or one fails; return what was seen."""
    if options.plant:
        return planted(options)
    failure = ""
    with RankedModels(options.ranks) as models:
        run = Episodes(models)
        for number in range(options.seed, options.seed + options.episodes):
            episode = random_episode(number)
            try:
                run.play(episode)
            except (AssertionError, RuntimeError) as error:
                failure = f"seed {number}: {type(error).__name__}: {error}; {episode}"
            if failure := failure or models.failure:
                break
    return {**run.counts, "misses": {failure: 1} if failure else {}}


def planted(options: argparse.Namespace) -> dict[str, Any]:
    """Spoil one operation, and tell how soon that was found and in which words."""
    episode, error = Episode(RANKED_NAMES[0], [("extend", seed) for seed in range(6)]), ""
    plant = partial(PlantedLink, plant=options.plant, after=40)
    faulthandler.dump_traceback_later(HANG_S_MAX, exit=True)  # of their start too
    with RankedModels(options.ranks, plant) as models:
        try:
            Episodes(models).play(episode, adds_noise=options.plant == "noise")
        except Exception as wrong:  # whatever a spoiled operation leads to
            error = f"{type(wrong).__name__}: {wrong}"
        found_s = (
            models.failed_at - models.link.planted_at if models.failed_at else time.monotonic()
        )
        failure = models.failure
    is_found = error.startswith("RankMismatch") or (failure and 0 < found_s <= 2.0)
    misses = {} if is_found else {f"{options.plant} was not found: {error}": 1}
    return {"failure": failure, "error": error, "found_s": found_s, "misses": misses}
