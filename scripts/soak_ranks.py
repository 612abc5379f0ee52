#!/usr/bin/env python
"""Plays random operations on a model over ranks and compares every answer with a cold one.

    python -m scripts.soak_ranks [--minutes 60 | --episodes N] [--ranks 2] [--seed S] [--json FILE]
    python -m scripts.soak_ranks --plant order|dropped|changed|noise [--after N]

An episode is a fixture, exact mode or not, ample room or hardly any, with files or without, and
some operations: turns, edits, branches, several at once, cancels amid prefill and answer, a cache
that is emptied amid either. With files all ranks then forget all but these, of which some of one
rank may be gone or garbled, and every prompt is asked again. Exact answers are a cold cache's to
the bit, others to the token; all are what one rank says, but in bfloat16 and where its two best
tokens are a tie.
--plant spoils one operation and tells how soon that was found.
Exit status: 0 all of it held, or what was planted was found within 2 s; 1 not so.
"""

import argparse
import faulthandler
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from hearth.shared.settings_from_env import load_settings
from hearth.worker.cache.block_hash import root_hash
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.ranks.rank_link import LeaderLink
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures.rank_fixtures import RANKED_NAMES, rank_fixture_dir
from scripts.harness.ranks.planted_link import PLANTS, PlantedLink
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

HANG_S_MAX: Final = 240.0  # of an episode: whoever waits so long waits for ever
FLUSH_S_MAX: Final = 30.0
FOUND_S_MAX: Final = 2.0
AFTER: Final = 40  # operations before the one that is spoiled

Operation = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Episode:
    """What is done on a freshly loaded model."""

    fixture: str
    is_exact: bool
    slots_max: int
    budget_kb: int | None  # None = ample
    has_files: bool
    spoilt: str  # what befalls files of one rank before they are read: "" | "missing" | "garbled"
    operations: tuple[Operation, ...]


def random_episode(chance: random.Random, fixture: str) -> Episode:
    is_tight = chance.random() < 0.4
    count = chance.randint(OPERATIONS_MIN, OPERATIONS_MAX)
    return Episode(
        fixture,
        chance.random() < 0.5,
        chance.randint(1, 3) if is_tight else 4,
        chance.choice((0, 400, 1500)) if is_tight else None,
        chance.random() < 0.6,
        chance.choice(("", "", "missing", "garbled")),
        tuple((chance.choice(OPERATION_NAMES), chance.randrange(SEED_MAX)) for _ in range(count)),
    )


@dataclass(slots=True)
class Soak:
    """One run. Owner: the thread that computes."""

    ranks: RankedModels
    dtype: str
    quant: int | None
    counts: Counter[str] = field(default_factory=Counter)

    def play(self, episode: Episode, *, adds_noise: bool = False) -> None:
        """Do an episode. Raises: AssertionError, where an answer differs."""
        directory = rank_fixture_dir(episode.fixture)
        talk = self._talk(episode, directory, adds_noise)
        play(talk, list(episode.operations), episode.is_exact, is_ample=episode.budget_kb is None)
        self._count(talk, episode)
        if episode.has_files:
            assert self.ranks.flush(FLUSH_S_MAX), "files were not written in time"
            self._spoil(episode)
            again = self._talk(episode, directory, adds_noise)
            for prompt in talk.prompts:
                self.counts["tokens read back"] += again.ask(prompt, episode.is_exact).cached
            self._count(again, episode)
        self.counts["episodes"] += 1

    def _spoil(self, episode: Episode) -> None:
        """Have some files of one rank be gone, or hold something else."""
        if not episode.spoilt:
            return
        chance = random.Random(str(episode.operations))
        files = self.ranks.files_of(chance.randrange(self.ranks.size))
        for file in chance.sample(files, (len(files) + 1) // 2):
            self.counts[f"files {episode.spoilt}"] += 1
            if episode.spoilt == "missing":
                file.unlink()
            else:
                raw = bytearray(file.read_bytes())
                raw[chance.randrange(len(raw))] ^= 0xFF
                file.write_bytes(raw)

    def _talk(self, episode: Episode, directory: Path, adds_noise: bool) -> Talk:
        loaded = self.ranks.load(directory, adds_noise=adds_noise)
        engine = self.ranks.engine(loaded, is_exact=episode.is_exact)
        # Of its own: what an earlier episode's files lack was not read in this one.
        root = root_hash([directory.name, str(self.counts["episodes"])])
        rules: dict[str, Any] = {"is_exact": episode.is_exact, "engine": engine, "root": root}
        cold = self.ranks.machine(loaded, keeps=False, **rules)
        if episode.has_files:
            rules["disk_thread"] = self.ranks.disk_thread(root)
        if episode.budget_kb is not None:
            rules["budget_mb"] = episode.budget_kb / 1024
        warm = self.ranks.machine(loaded, slots_max=episode.slots_max, **rules)
        return Talk(loaded, warm, cold)

    def _count(self, talk: Talk, episode: Episode) -> None:
        """Count what was asked; hold what the ranks say of a cold cache to what one rank says."""
        self.counts.update(name for name, _ in episode.operations)
        self.counts["prompts warm"] += len(talk.prefilled)
        lone = lone_machine(talk.directory, episode.is_exact)
        for prompt, cold in talk.cold_answers.items():
            alone = lone.ask(list(prompt), TOKENS_MAX)
            self.counts["prompts cold"] += 1
            self.counts["as one rank says"] += alone.tokens == cold.tokens
            if self.dtype == "float32":
                same_tokens(cold, alone)


@cache
def lone_model(directory: Path) -> LoadedModel:
    return load_model(load_settings({"MODEL_PATH": str(directory)}, None))


def lone_machine(directory: Path, is_exact: bool) -> Machine:
    """Return a machine of one rank that keeps nothing."""
    loaded = lone_model(directory)
    marks, words = turn_marks(loaded.tokenizer), Vocabulary(loaded.tokenizer)
    return Machine(loaded, marks, words, keeps=False, is_exact=is_exact)


# ---------------------------------------------------------------- runs


def soak(options: argparse.Namespace) -> int:
    """Play episodes until the time, or their number, is over."""
    chance = random.Random(options.seed)
    fixtures, began = options.fixtures.split(","), time.monotonic()
    failure: str | None = None
    with RankedModels(options.ranks) as ranks:
        run = Soak(ranks, options.dtype, options.quant)
        number = 0
        while failure is None and _goes_on(options, number, began):
            episode = random_episode(chance, fixtures[number % len(fixtures)])
            faulthandler.dump_traceback_later(HANG_S_MAX, exit=True)
            try:
                run.play(episode)
            except (AssertionError, RuntimeError) as error:
                failure = f"{type(error).__name__}: {error}; {ranks.failure}; in {episode}"
            number += 1
        faulthandler.cancel_dump_traceback_later()
        failure = failure or ranks.failure
    took_s = time.monotonic() - began
    told = {"ranks": options.ranks, "seconds": round(took_s, 1), **run.counts, "failure": failure}
    told |= {"weights": options.dtype + (f", {options.quant} bits" if options.quant else "")}
    tell(told, options.json)
    return 1 if failure else 0


def tell(told: dict[str, Any], file: Path | None) -> None:
    text = json.dumps(told, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


def _goes_on(options: argparse.Namespace, number: int, began: float) -> bool:
    if options.episodes:
        return bool(number < options.episodes)
    return bool(time.monotonic() - began < options.minutes * 60)


def planted(options: argparse.Namespace) -> int:
    """Spoil one operation, and tell how soon that was found and in which words."""
    links: list[PlantedLink] = []

    def wrap(link: LeaderLink) -> LeaderLink:
        links.append(PlantedLink(link, options.plant, options.after))
        return links[0]

    operations = tuple(("extend", seed) for seed in range(6))
    episode = Episode(options.fixtures.split(",")[0], True, 4, None, False, "", operations)
    error = ""
    faulthandler.dump_traceback_later(HANG_S_MAX, exit=True)
    with RankedModels(options.ranks, wrap) as ranks:
        try:
            Soak(ranks, options.dtype, options.quant).play(
                episode, adds_noise=options.plant == "noise"
            )
        except Exception as wrong:  # whatever a spoiled operation leads to
            error = f"{type(wrong).__name__}: {wrong}"
        by_link = ranks.failed_at - links[0].planted_at if ranks.failed_at else 0.0
        told = {"plant": options.plant, "failure": ranks.failure, "error": error}
    is_found = error.startswith("RankMismatch") or (bool(told["failure"]) and by_link > 0)
    told |= {"found_s": round(by_link, 2), "is_found": is_found and by_link <= FOUND_S_MAX}
    tell(told, options.json)
    return 0 if told["is_found"] else 1


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--episodes", type=int, help="instead of minutes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fixtures", default=",".join(RANKED_NAMES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quant", type=int, metavar="BITS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("--after", type=int, default=AFTER, help="operations before the spoiled")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = options_of()
    code = planted(given) if given.plant else soak(given)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that use MLX must not outlive the interpreter
