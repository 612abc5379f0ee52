"""Serves a tiny model of each architecture of mlx-lm and mlx-vlm, warm against cold.

    python -m scripts.harness.architectures [--only mlx_vlm/hy_v4 ...] [--record]

It prints a line for each. --record writes what came of it into the recorded table, which
docs/models.md shows: run `python -m scripts.docs.architectures_table` behind it.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import yaml
from mlx.utils import tree_map_with_path

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings, load_settings
from hearth.worker.cache.extent_store import MB
from hearth.worker.cache.image_keys import ImageRun, PromptImage
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.setup.kv_setup import is_exact
from hearth.worker.setup.load_setup import make_vision
from hearth.worker.stream.detokenise import Vocabulary
from scripts.docs.architectures_table import DATA, LIBRARIES, RECORDED, recorded
from scripts.fixtures import checkpoint_files, vision_families
from scripts.fixtures.fixture_cache import cache_dir, fixture_dir
from scripts.fixtures.make_fixture import QWEN_MARKER, TEMPLATE, TOKEN_NAMES, Config
from scripts.fixtures.vision_family_configs import CACHED, FAMILIES
from scripts.harness.image_files import painted, saved
from scripts.harness.socketless_worker import Answer, Machine
from scripts.harness.warm.token_margins import COUNTED, same_bits, same_tokens

# With the processor that each ships with: these see images.
PROCESSED: Final = {**FAMILIES, **CACHED}
# Text models of types that mlx-vlm alone knows, or loads with all their parts.
TEXT_OF_MLX_VLM: Final = (
    *("cohere2_moe", "deepseek_v4", "deepseek_v41", "flint", "hy_v4", "k2_horizon", "kolibri1"),
    *("limite", "longcat_flash_sparse", "minimax_m3", "qwen3_5_moe_text", "qwen3_5_text"),
    *("xing4_0", "z1t"),
)
# What a row of the table tells.
TOLD: Final = ("caches", "exact", "reuse", "because", "fails", "image", "answers", "ties", "differ")
# Of tokens that some processors ask the tokenizer for.
OTHER_NAMES: Final = dict.fromkeys(
    ("audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token"), "<|vision_pad|>"
)
TOKENS_MAX: Final = 12
FEW: Final = 24  # tokens that full reuse may read beside the new ones: an answer and a header


@cache
def told() -> dict[str, Any]:
    """Return what configs.yaml says."""
    return dict(yaml.load((DATA / "configs.yaml").read_bytes(), yaml.CSafeLoader))


def names() -> list[str]:
    """Return the library and the name of each architecture that can be made."""
    own = {library: [*told()[library]] for library in LIBRARIES}
    own["mlx_vlm"] += PROCESSED
    return [f"{library}/{name}" for library in LIBRARIES for name in sorted(own[library])]


# ---------------------------------------------------------------- its checkpoint


def configuration(name: str) -> Config:
    """Return the tiny configuration of "library/name"."""
    library, entry = name.split("/")
    more = dict(told()[library][entry] or {})
    kind, is_flat = str(more.pop("module", entry)), more.pop("flat", False)
    module = importlib.import_module(f"{library}.models.{kind}")
    class_ = module.ModelArgs if library == "mlx_lm" else module.ModelConfig
    config = _shrunk(class_, module, more)
    return {"model_type": kind} | (config.pop("text_config") if is_flat else {}) | config


def _shrunk(class_: type, module: Any, more: Mapping[str, Any]) -> Config:
    """Return a configuration of `class_`: the table's sizes, and `more` over them.

    A part's `like` names the mlx-lm architecture that it is one of.
    """
    config: Config = {}
    for each in dataclasses.fields(class_):
        part = _part_class(module, each.name)
        if part is not None:
            inner = dict(more.get(each.name) or {})
            config[each.name] = _shrunk(part, module, inner)
        elif each.name == "model_type" and each.default is dataclasses.MISSING:
            config[each.name] = module.__name__.rpartition(".")[2]
        elif each.name in told()["sizes"]:
            config[each.name] = told()["sizes"][each.name]
        elif each.name in told()["needed"] and each.default is dataclasses.MISSING:
            config[each.name] = told()["needed"][each.name]
    for name, value in more.items():
        if isinstance(value, dict) and "like" in value:
            other = configuration(f"mlx_lm/{value['like']}")
            config[name] = other.get(name, other) | {
                key: size for key, size in value.items() if key != "like"
            }
        elif not isinstance(config.get(name), dict):
            config[name] = value
    return config


def _part_class(module: Any, field: str) -> type | None:
    """Return the class of a configuration's part, as of "text_config", if it has one."""
    name, _, rest = field.partition("_")
    kinds = (f"{name.title()}{kind}" for kind in ("Config", "Args", "ModelArgs"))
    found = (getattr(module, kind) for kind in kinds if hasattr(module, kind))
    return next(found, None) if rest == "config" else None


def _tempered(model: nn.Module) -> None:
    """Have what a model says depend on its whole prompt.

    Where embeddings are the head too, a model whose layers add little repeats its last token, and
    `randomise` knows a norm by its name alone.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            module.weight = module.weight * 0.01
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and "norm" not in path.lower():
            module.weight = mx.ones_like(module.weight)
    model.update(tree_map_with_path(_unscaled, model.parameters()))


def _unscaled(path: str, array: mx.array) -> mx.array:
    is_one = path.endswith(("hidden_states_scale", "residual_scale"))
    return mx.ones_like(array) if is_one else array


def _temper_file(path: Path) -> None:
    """Do so in a checkpoint whose embeddings are the head too."""
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    if not any("lm_head" in name for name in weights):
        for name in [name for name in weights if name.endswith("embed_tokens.weight")]:
            weights[name] = weights[name] * 0.01
        mx.eval(weights)  # before the file is written anew
        checkpoint_files.save_weights(path.parent, weights)


def make_checkpoint(name: str, directory: Path) -> None:
    """Write a random checkpoint of "library/name" into a directory that is empty or not there."""
    library, entry = name.split("/")
    tokenizer = fixture_dir("qwen3") / "tokenizer.json"
    if library == "mlx_vlm" and entry in PROCESSED:
        seeing = fixture_dir("qwen3_vl") / "tokenizer.json"
        vision_families.make_checkpoint(PROCESSED[entry], directory, seeing, "float32")
        return _temper_file(directory / "model.safetensors")
    config = configuration(name)
    directory.mkdir(exist_ok=True)
    (directory / tokenizer.name).write_bytes(tokenizer.read_bytes())
    template = TEMPLATE.replace("@@IMAGE@@", QWEN_MARKER)
    checkpoint_files.write_tokenizer_config(directory, template, TOKEN_NAMES | OTHER_NAMES)
    ids = checkpoint_files.added_token_ids(tokenizer)
    config["eos_token_id"] = [ids[token] for token in checkpoint_files.END_TOKENS]
    config["torch_dtype"] = "float32"
    plain = json.loads(json.dumps(config))
    if library == "mlx_lm":
        model = vision_families.text_model(plain)
    else:
        model = checkpoint_files.vision_model(plain)
        if "vision" in json.dumps(config):
            pixels = {"image_processor_type": "CLIPImageProcessor"}
            checkpoint_files.write_json(directory / "preprocessor_config.json", pixels)
    _tempered(model)
    checkpoint_files.save_weights(directory, model.parameters())
    checkpoint_files.write_json(directory / "config.json", config)


# ---------------------------------------------------------------- how it is served


@cache
def architecture_dir(name: str) -> Path:
    """Return the directory of the tiny checkpoint "library/name", made once a machine."""
    target = cache_dir(DATA / "configs.yaml", Path(__file__)) / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made:
            make_checkpoint(name, Path(made) / "model")
            with contextlib.suppress(OSError):  # another process made it meanwhile
                (Path(made) / "model").rename(target)
    return target


@dataclass(frozen=True)
class Turn:
    """A prompt, how much of it was read or said before, and the cold answer to it."""

    ids: list[int]
    known: int
    cold: Answer


def served(directory: Path) -> dict[str, Any]:
    """Return what came of serving a checkpoint: its row in the table.

    `fails` is an error's text, and `because` the cache that cannot be restored. `reuse` is "full"
    where each turn reads hardly more than its new tokens; `beside` is how many more. `kept` and
    `restored` are of a worker with one slot, `evicted` of one with room for half of that. `differ`
    tells the answers that are not the cold ones, and `off` how far first tokens' log probabilities
    are from these; `said` counts the tokens that occur in answers.
    """
    settings = load_settings({"MODEL_PATH": str(directory), "DTYPE": "bfloat16"}, None)
    try:
        loaded = load_model(settings)
    except StartError as error:
        return {"fails": _line(error)}
    exact = is_exact(loaded, settings)
    row = {"caches": loaded.facts.cache_layout, "exact": exact}
    try:
        return row | _played(loaded, settings, exact)
    except UnknownCache as unknown:
        return row | {"reuse": "none", "because": str(unknown)}
    except Exception as error:  # any error of an architecture
        return row | {"fails": f"{type(error).__name__}: {_line(error)}"}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rpartition("cannot be loaded: ")[2][:160]


def _played(loaded: LoadedModel, settings: Settings, exact: bool) -> dict[str, Any]:
    marks, words = turn_marks(loaded.tokenizer), Vocabulary(loaded.tokenizer)
    machine = partial(Machine, loaded, marks, words, is_exact=exact)
    vision, image = make_vision(loaded, settings), None
    if vision is not None:
        image = vision.reader.read("image", saved(painted(0, (112, 112)), "PNG"))
    ties = len(COUNTED.ties)
    turns = _cold_turns(machine(keeps=False), loaded.tokenizer, image)
    beside, differ, off = _compared(machine(), turns)
    # With one slot all that another prompt needs is put back from what is kept.
    by_turns = [turn for each in turns for turn in (each, turns[0])]
    one_slot = machine(slots_max=1)
    _, differ_then, off_then = _compared(one_slot, by_turns)
    budget_mb = one_slot.keeper.store.budget.bytes_used / 2 / MB
    tight = machine(slots_max=1, budget_mb=budget_mb)
    _, differ_last, off_last = _compared(tight, by_turns)
    are_full = [count <= FEW for count in beside[1:]]
    return {
        "reuse": "full" if all(are_full) else "part" if any(are_full) else "none",
        "beside": beside,
        "image": image is not None,
        "answers": len(turns) + 2 * len(by_turns),
        "ties": len(COUNTED.ties) - ties,
        "differ": differ + differ_then + differ_last,
        "off": max(off, off_then, off_last),
        "said": len({token for turn in turns for token in turn.cold.tokens}),
        "kept": kept_parts(one_slot),
        "restored": one_slot.keeper.counts["restored_tokens"],
        "evicted": dict(tight.keeper.transfer.evictor.evicted),
    }


def _cold_turns(cold: Machine, tokenizer: Any, image: PromptImage | None) -> list[Turn]:
    """Lead a conversation: growing turns, a fork back to the first, and the last turn again.

    The first prompt shows the image.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    user, end = encode("<|im_start|>user\n"), encode("<|im_end|>\n")
    header = encode("<|im_start|>assistant\n")
    shown = [] if image is None else [*image.ids]
    runs = [] if image is None else [ImageRun(len(user), len(user + shown), image)]
    chance, turns = random.Random(7), list[Turn]()
    said: list[list[int]] = [[]]  # up to the end of each turn
    for before, new in ((0, 300), (1, 72), (2, 72), (1, 72)):
        words = [chance.randrange(300, 2900) for _ in range(new)]
        ids = [*said[before], *user, *([] if before else shown), *words, *end, *header]
        turns.append(Turn(ids, len(said[before]), cold.ask(ids, TOKENS_MAX, images=runs)))
        said.append([*ids, *turns[-1].cold.tokens, *end])
    last = turns[2]
    return [*turns, Turn(last.ids, len(last.ids), last.cold)]


def _compared(warm: Machine, turns: Sequence[Turn]) -> tuple[list[int], list[str], float]:
    """Return how many tokens each turn read beside its new ones, and where answers differ.

    And how far the log probabilities of first tokens are off, whether or not that shows.
    """
    beside, differ, off = list[int](), list[str](), 0.0
    same = same_bits if warm.keeper.rules.is_exact else same_tokens
    for turn in turns:
        answer = warm.ask(turn.ids, TOKENS_MAX, images=turn.cold.request.query.images)
        beside.append(answer.prefilled - (len(turn.ids) - turn.known))
        try:
            same(answer, turn.cold)
        except AssertionError as difference:
            differ.append(_line(difference))
        mine, theirs = answer.logits[0], turn.cold.logits[0]  # some are minus infinity in both
        gaps = np.subtract(mine, theirs, out=np.zeros_like(mine), where=mine != theirs)
        off = max(off, float(np.abs(gaps).max()))
    warm.check()
    return beside, differ, off


def kept_parts(machine: Machine) -> dict[str, int]:
    """Return how many parts of each sort a worker keeps."""
    store = machine.keeper.store
    parts = {
        "rows": [extent.body for extent in store.extents],
        "windows": [extent.window for extent in store.extents],
        "states": [node.snapshot for node in store.nodes],
    }
    counts = {sort: sum(part is not None for part in held) for sort, held in parts.items()}
    return {sort: count for sort, count in counts.items() if count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=names())
    parser.add_argument("--record", action="store_true", help="write the rows into the table")
    options = parser.parse_args()
    for name in options.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            row = made_and_served(name, Path(scratch) / "model")
        print(f"{name} {time.monotonic() - began:.1f} s: {row}", flush=True)
        if options.record:
            record(name, row)


def made_and_served(name: str, directory: Path) -> dict[str, Any]:
    """Return an architecture's row; one that cannot be made has an error's text too."""
    try:
        make_checkpoint(name, directory)
    except Exception as error:  # of data, or of an architecture that changed
        return {"fails": f"no checkpoint: {type(error).__name__}: {_line(error)}"}
    return served(directory)


def record(name: str, row: Mapping[str, Any]) -> None:
    """Write a row into the table, without what differs from machine to machine."""
    rows = recorded() | {name: {key: row[key] for key in TOLD if row.get(key)}}
    rows = {each: rows[each] for each in names() if each in rows}
    lines = (f" {json.dumps(each)}: {json.dumps(row)}" for each, row in rows.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
