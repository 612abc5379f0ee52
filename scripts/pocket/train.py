#!/usr/bin/env python
"""Trains builtin:pocket: makes its conversations, its tokenizer and its weights.

    python -m scripts.pocket.train train --work DIR [--minutes 60]
    python -m scripts.pocket.train train --work DIR --from worker/engine/pocket
    python -m scripts.pocket.train export --work DIR --out DIR
    python -m scripts.pocket.train evaluate DIR [--talks 200]

`train` needs PyTorch (`pip install torch`), uses a GPU where there is one, saves its state every
three minutes and goes on from there when it is run again. `evaluate` needs what Hearth needs. The
same seed gives the same conversations; the same weights come only from the same machine and time.
With `--from` it goes on from exported weights, with more of a newcomer's chats. Those in
worker/engine/pocket took `--minutes 90 --threads 1 --compile` on one core with AMX, and then
`--from worker/engine/pocket` for 1,916 steps, while the wordings were still being added to.
Faster on Linux: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=68719476736.
"""

import argparse
import dataclasses
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tokenizers import Tokenizer

from scripts.pocket import conversation_tokens
from scripts.pocket.conversations import chat, talk

if TYPE_CHECKING:
    import torch

SEED: Final = 6
PROJECT_DIR: Final = Path(__file__).resolve().parents[2]
TEMPLATE: Final = PROJECT_DIR / "worker" / "engine" / "pocket" / "chat_template.jinja"
ROW_TOKENS_MAX: Final = 4_096
STEP_TOKENS: Final = 3_072
POOL_TALKS: Final = 600
RATE: Final = 3e-3
TUNING_RATE: Final = 1.5e-3  # where the training goes on from exported weights
WARM_STEPS: Final = 50
DECAY_FROM: Final = 0.65  # of the minutes; then the rate falls to a thirtieth
SHOW_S: Final = 30.0
SAVE_S: Final = 180.0
IGNORED: Final = -100


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One conversation as tokens; `learned` marks those whose prediction counts."""

    ids: list[int]
    learned: list[bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """What is trained on until so much of the time is over."""

    until: float
    copying: float  # the share of rows of random tokens
    copied: tuple[int, ...]  # their lengths
    moves: tuple[int, ...]
    sentences: tuple[int, ...]  # of the document at the beginning; 17 tokens each
    tools: tuple[int, ...]  # offered at most; 70 tokens each
    chats: float = 0.5  # the share of a newcomer's first chats among what is not copied; 100 tokens


CHAT_MOVES: Final = (1, 1, 1, 2, 4, 6)
STAGES: Final = (
    Stage(0.06, 0.5, (24, 48), (1, 2, 3), (0,), (0,)),
    Stage(0.16, 0.15, (48, 120), (2, 3, 5), (0, 0, 4, 8), (0, 0, 1, 2)),
    Stage(0.5, 0.04, (120, 250), (3, 6, 10), (0, 0, 0, 8, 25), (0, 1, 2, 3, 5)),
    Stage(0.75, 0.04, (250, 900), (3, 6, 10), (0, 0, 0, 0, 10, 25, 60), (0, 1, 2, 3, 5, 8)),
    Stage(2.0, 0.04, (250, 3_000), (3, 6, 10), (*(0,) * 12, *(20, 60) * 3, 230), (0, 1, 3, 5, 8)),
)
# What exported weights go on with: two thirds of the tokens are of chats.
TUNING: Final = Stage(
    2.0, 0.01, (250, 3_000), (3, 6, 10), (*(0,) * 12, *(20, 60) * 3, 230), (0, 1, 3, 5, 8), 0.95
)


# ---------------------------------------------------------------- conversations


def talk_row(rng: random.Random, tokenizer: Tokenizer, stage: Stage) -> Row:
    """Return a random conversation of `stage`."""
    if rng.random() < stage.copying:
        return copy_row(rng, stage.copied)
    if rng.random() < stage.chats:
        made = chat(rng, rng.choice(CHAT_MOVES))
    else:
        made = talk(
            rng,
            rng.choice(stage.moves),
            rng.choice(stage.sentences),
            rng.choice(stage.tools),
        )
    return Row(*conversation_tokens.encoded(tokenizer, conversation_tokens.script(rng, made)))


def copy_row(rng: random.Random, lengths: tuple[int, ...]) -> Row:
    """Return random tokens with stretches of them said again: what copying is learned from."""
    length = rng.choice(lengths)
    words = [
        rng.randrange(conversation_tokens.VOCAB_SIZE - len(conversation_tokens.ADDED))
        for _ in range(length)
    ]
    ids, learned = list(words), [False] * length
    for _ in range(6):
        begin = rng.randrange(length - 12)
        piece = words[begin : begin + rng.randrange(4, 24)]
        ids += piece
        learned += [False, *([True] * (len(piece) - 1))]
    return Row(ids, learned)


def batches(
    tokenizer: Tokenizer, seed: int, progress: "Progress"
) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Yield (ids, targets), each (rows, length), rows of about one length together."""
    rng = random.Random(seed)
    while True:
        pool: list[Row] = []
        while len(pool) < POOL_TALKS:
            row = talk_row(rng, tokenizer, progress.stage)
            if len(row.ids) <= ROW_TOKENS_MAX and any(row.learned):
                pool.append(row)
        pool.sort(key=lambda row: len(row.ids))
        found: list[list[Row]] = [[]]
        for row in pool:
            if (len(found[-1]) + 1) * len(row.ids) > STEP_TOKENS and found[-1]:
                found.append([])
            found[-1].append(row)
        rng.shuffle(found)
        yield from map(padded, found)


def padded(rows: list[Row]) -> tuple[list[list[int]], list[list[int]]]:
    """Return equal lengths; a target is the next token where that is learned."""
    width = -(-max(len(row.ids) for row in rows) // 64) * 64
    ids, targets = [], []
    for row in rows:
        blank = width - len(row.ids)
        ids.append(row.ids + [0] * blank)
        following = [
            token if is_learned else IGNORED
            for token, is_learned in zip(row.ids[1:], row.learned[1:], strict=True)
        ]
        targets.append(following + [IGNORED] * (blank + 1))
    return ids, targets


# ---------------------------------------------------------------- training


@dataclasses.dataclass(slots=True)
class Progress:
    """How far the training is, counted over all its runs, in time of a processor for each thread.

    What else a machine does makes the training later, and not shorter.
    """

    minutes: float
    is_tuning: bool = False
    trained_s: float = 0.0
    step: int = 0

    @property
    def done(self) -> float:
        return min(1.0, self.trained_s / (60 * self.minutes))

    @property
    def stage(self) -> Stage:
        """What is trained on now; the further the training, the longer the conversations."""
        if self.is_tuning:
            return TUNING
        return next(stage for stage in STAGES if self.done < stage.until)

    @property
    def rate(self) -> float:
        """The learning rate: up, level, down."""
        warm = min(1.0, (self.step + 1) / WARM_STEPS)
        fall = max(0.0, (self.done - DECAY_FROM) / (1 - DECAY_FROM))
        return (TUNING_RATE if self.is_tuning else RATE) * warm * (1 - fall * (1 - 1 / 30))


def tokenizer_in(work: Path) -> Tokenizer:
    """Return the tokenizer of `work`, trained where it is missing."""
    path = work / "tokenizer.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        rng = random.Random(SEED)
        texts = []
        for number in range(8_000):
            made = (
                chat(rng, 3)
                if number % 3 == 0
                else talk(rng, rng.choice((1, 3, 6)), rng.choice((0, 0, 10)), rng.choice((0, 0, 2)))
            )
            texts.append("".join(text for text, _ in conversation_tokens.script(rng, made)))
        conversation_tokens.train_tokenizer(path, texts)
    return Tokenizer.from_file(str(path))


def new_model() -> tuple[Any, dict[str, Any]]:
    """Return a model with initial weights, and its config.json."""
    from scripts.pocket import qwen3_torch

    config = qwen3_torch.CONFIG | {"vocab_size": conversation_tokens.VOCAB_SIZE}
    return qwen3_torch.Dense(config), config


def optimizers(model: Any) -> "list[torch.optim.Optimizer]":
    """Return Muon for the matrices between the layers and AdamW for everything else."""
    import torch

    matrices: list[Any] = []
    others: list[Any] = []
    for name, weight in model.named_parameters():
        is_matrix = weight.ndim == 2 and "embed" not in name and min(weight.shape) > 16
        (matrices if is_matrix else others).append(weight)
    return [
        torch.optim.Muon(matrices, lr=RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def train(options: argparse.Namespace) -> None:
    """Train until the minutes are over; the state lies in the work directory."""
    import torch

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.exported:
        options.work.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(options.exported / "tokenizer.json", options.work / "tokenizer.json")
    tokenizer = tokenizer_in(options.work)
    model = new_model()[0].to(device)
    steppers = optimizers(model)
    progress = Progress(options.minutes, is_tuning=options.exported is not None)
    state = options.work / "dense.state.pt"
    if state.exists():
        _load(state, model, steppers, progress)
    elif options.exported is not None:
        _load_exported(options.exported, model)
    hidden = torch.compile(model.hidden, dynamic=True) if options.compile else model.hidden
    data = batches(tokenizer, SEED + progress.step, progress)
    saved = shown = time.monotonic()
    losses: list[float] = []
    while progress.done < 1:
        began = time.process_time()
        ids, targets = (torch.tensor(part, device=device) for part in next(data))
        losses.append(_step(model, hidden, steppers, progress.rate, ids, targets))
        progress.step += 1
        progress.trained_s += (time.process_time() - began) / options.threads
        now = time.monotonic()
        if now - shown > SHOW_S:
            mean = sum(losses) / len(losses)
            print(f"{progress.trained_s:6.0f} s step {progress.step} loss {mean:.4f}", flush=True)
            shown, losses = now, []
        if now - saved > SAVE_S or progress.done == 1:
            _save(state, model, steppers, progress)
            saved = time.monotonic()


def _step(model: Any, hidden: Any, steppers: Any, rate: float, ids: Any, targets: Any) -> float:
    import torch

    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        states = hidden(ids)
        counts = targets != IGNORED
        logits = model.logits(states[counts])
    loss = torch.nn.functional.cross_entropy(logits.float(), targets[counts])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return float(loss.detach())


def _save(path: Path, model: Any, steppers: Any, progress: Progress) -> None:
    import torch

    whole = {
        "model": model.state_dict(),
        "steppers": [stepper.state_dict() for stepper in steppers],
        "trained_s": progress.trained_s,
        "step": progress.step,
    }
    torch.save(whole, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def _load(path: Path, model: Any, steppers: Any, progress: Progress) -> None:
    import torch

    whole = torch.load(path, weights_only=True)
    model.load_state_dict(whole["model"])
    for stepper, state in zip(steppers, whole["steppers"], strict=True):
        stepper.load_state_dict(state)
    progress.trained_s, progress.step = whole["trained_s"], whole["step"]


def _load_exported(directory: Path, model: Any) -> None:
    """Take over weights as `export` writes them."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(directory / "model.safetensors"))


# ---------------------------------------------------------------- what is served


def export(options: argparse.Namespace) -> None:
    """Write the trained weights as a directory that `mlx_lm.load` loads, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from scripts.fixtures.checkpoint_files import (
        END_TOKENS,
        added_token_ids,
        write_json,
        write_tokenizer_config,
    )

    model, config = new_model()
    whole = torch.load(options.work / "dense.state.pt", weights_only=True)
    model.load_state_dict(whole["model"])
    options.out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to(torch.bfloat16).contiguous() for name, weight in model.weights().items()
    }
    save_file(weights, options.out / "model.safetensors", {"format": "mlx"})
    tokenizer_file = options.out / "tokenizer.json"
    shutil.copyfile(options.work / "tokenizer.json", tokenizer_file)
    ids = added_token_ids(tokenizer_file)
    ends = [ids[token] for token in END_TOKENS]
    template = TEMPLATE.read_text()
    names = {"bos_token": None, "model_max_length": config["max_position_embeddings"]}
    write_tokenizer_config(options.out, template, names)
    write_json(options.out / "config.json", config | {"eos_token_id": ends})
    generation = {"eos_token_id": ends, "pad_token_id": ends[1]}
    write_json(options.out / "generation_config.json", generation)
    print(f"{sum(weight.numel() for weight in weights.values()):,} parameters in {options.out}")


def examine(options: argparse.Namespace) -> None:
    """Print how often a directory's model does what pocket is for."""
    from scripts.pocket.evaluate import evaluate

    for skill, rate in evaluate(options.directory, options.talks, options.long).items():
        print(f"{skill:30} {rate}")
        for missed in rate.missed[: options.show]:
            print("   ", missed)


# ---------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="make the weights")
    training.add_argument(
        "--work", type=Path, required=True, help="directory of states and tokenizer"
    )
    training.add_argument("--minutes", type=float, default=60.0)
    training.add_argument(
        "--from", dest="exported", type=Path, help="exported weights to go on from"
    )
    training.add_argument("--threads", type=int, default=2)
    training.add_argument("--compile", action="store_true", help="1.3 times faster on a CPU")
    training.set_defaults(run=train)
    exporting = commands.add_parser("export", help="write what is served")
    exporting.add_argument("--work", type=Path, required=True)
    exporting.add_argument("--out", type=Path, required=True)
    exporting.set_defaults(run=export)
    examining = commands.add_parser("evaluate", help="ask what no training conversation asked")
    examining.add_argument("directory", type=Path)
    examining.add_argument("--talks", type=int, default=200, help="questions for each skill")
    examining.add_argument("--long", type=int, default=200, help="those of 4,000 tokens")
    examining.add_argument("--show", type=int, default=0, help="failures printed for each skill")
    examining.set_defaults(run=examine)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
