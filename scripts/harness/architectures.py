"""Serves a tiny model of each architecture of mlx-lm and mlx-vlm, warm against cold.

    python -m scripts.harness.architectures [--only mlx_vlm/hy_v4 ...] [--record] [--keep DIR]

It prints a line for each. --record writes what came of it into the recorded table, which
docs/models.md shows; --keep leaves the checkpoints in DIR.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import random
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from hearth.shared.errors import StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.setup.kv_setup import is_exact
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures import checkpoint_files
from scripts.fixtures.fixture_cache import cache_dir, fixture_dir
from scripts.fixtures.make_fixture import QWEN_MARKER, TEMPLATE, TOKEN_NAMES, Config
from scripts.harness.socketless_worker import Machine
from scripts.harness.warm.token_margins import COUNTED, same_tokens

DATA: Final = PROJECT_DIR / "tests" / "data" / "architectures"
PARTS: Final = ("text", "vision", "audio", "projector", "perceiver")
TURNS: Final = (300, 72, 72)  # new tokens of each growing turn
TOKENS_MAX: Final = 12
FEW: Final = 24  # tokens that full reuse may read beside the new ones: an answer and a header


@cache
def told() -> dict[str, Any]:
    """Return what configs.yaml says."""
    return dict(yaml.load((DATA / "configs.yaml").read_bytes(), yaml.CSafeLoader))


def names() -> list[str]:
    """Return the library and the name of each architecture that has a configuration."""
    return [f"{library}/{name}" for library in ("mlx_lm", "mlx_vlm") for name in told()[library]]


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


def make_checkpoint(name: str, directory: Path) -> None:
    """Write a random checkpoint of "library/name" into an empty directory."""
    config = configuration(name)
    shared = fixture_dir("qwen3") / "tokenizer.json"
    (directory / shared.name).write_bytes(shared.read_bytes())
    template = TEMPLATE.replace("@@IMAGE@@", QWEN_MARKER)
    checkpoint_files.write_tokenizer_config(directory, template, TOKEN_NAMES)
    ids = checkpoint_files.added_token_ids(shared)
    config["eos_token_id"] = [ids[token] for token in checkpoint_files.END_TOKENS]
    config["torch_dtype"] = "float32"
    plain = json.loads(json.dumps(config))
    if name.startswith("mlx_lm/"):
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        model = module.Model(module.ModelArgs.from_dict(plain))
        checkpoint_files.randomise(model)
    else:
        model = checkpoint_files.vision_model(plain)
        if "vision" in json.dumps(config):
            pixels = {"image_processor_type": "CLIPImageProcessor"}
            checkpoint_files.write_json(directory / "preprocessor_config.json", pixels)
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
            make_checkpoint(name, Path(made))
            with contextlib.suppress(OSError):  # another process made it meanwhile
                Path(made).rename(target)
                Path(made).mkdir()
    return target


def served(directory: Path) -> dict[str, Any]:
    """Return what came of serving the checkpoint."""
    settings = load_settings({"MODEL_PATH": str(directory), "DTYPE": "bfloat16"}, None)
    try:
        loaded = load_model(settings)
    except StartError as error:
        return {"fails": _line(error)}
    row: dict[str, Any] = {"caches": loaded.facts.cache_layout}
    row["exact"] = is_exact(loaded, settings)
    try:
        return row | _played(loaded, row["exact"])
    except UnknownCache as unknown:
        return row | {"reuse": "none", "because": str(unknown)}
    except Exception as error:  # any error of an architecture
        return row | {"fails": f"{type(error).__name__}: {_line(error)}"}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rpartition("cannot be loaded: ")[2][:200]


def _played(loaded: LoadedModel, exact: bool) -> dict[str, Any]:
    """Lead a conversation: growing turns, a fork back to the first, and the last turn again."""
    marks, words = turn_marks(loaded.tokenizer), Vocabulary(loaded.tokenizer)
    warm = Machine(loaded, marks, words, is_exact=exact)
    cold = Machine(loaded, marks, words, keeps=False, is_exact=exact)
    end, user, header = (
        loaded.tokenizer.encode(text, add_special_tokens=False)
        for text in ("<|im_end|>\n", "<|im_start|>user\n", "<|im_start|>assistant\n")
    )
    chance = random.Random(7)
    known: list[list[int]] = [[]]  # behind each turn, what was read and answered
    prompts: list[list[int]] = []
    beside, distinct, differ, ties = list[int](), set[int](), list[str](), len(COUNTED.ties)
    for before in (0, 1, 2, 1, None):
        if before is None:
            ids, held = prompts[2], len(prompts[2])
        else:
            new = [chance.randrange(300, 2900) for _ in range(TURNS[before])]
            ids, held = [*known[before], *user, *new, *end, *header], len(known[before])
        answer, expected = warm.ask(ids, TOKENS_MAX), cold.ask(ids, TOKENS_MAX)
        try:
            same_tokens(answer, expected)
        except AssertionError as difference:
            differ.append(_line(difference))
        beside.append(answer.prefilled - (len(ids) - held))
        distinct.update(expected.tokens)
        prompts.append(ids)
        known.append(ids + answer.tokens + end)
    warm.check()
    reused = [count <= FEW for count in beside[1:]]
    return {
        "reuse": "full" if all(reused) else "part" if any(reused) else "none",
        "beside": beside,
        "answers": len(prompts),
        "ties": len(COUNTED.ties) - ties,
        "differ": differ,
        "distinct": len(distinct),
        "counts": dict(warm.keeper.counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=names())
    options = parser.parse_args()
    for name in options.only:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            try:
                make_checkpoint(name, Path(scratch))
            except Exception as error:
                row = {"made": f"{type(error).__name__}: {_line(error)}"}
                made = time.monotonic()
            else:
                made = time.monotonic()
                row = served(Path(scratch))
        print(name, f"{made - began:.1f}", f"{time.monotonic() - made:.1f}", row, flush=True)


if __name__ == "__main__":
    main()
