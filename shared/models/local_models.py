"""Finds the models on this disk: in the hub's cache, and in the folders of LM Studio and oMLX.

Only names, sizes and index files are read; nothing is loaded, and no hub is asked. File names are
compared without case and in Unicode's compatibility form, as tolerant file systems do: on APFS and
exFAT a loader that opens `config.json` may get `Config.json`.
"""

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants


def files_like(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files in `directory` that match any of the lower-case `patterns`, sorted."""
    wanted = tuple(patterns)
    return sorted(
        path
        for path in directory.glob("*")
        if any(fnmatchcase(_folded(path.name), pattern) for pattern in wanted)
    )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


HUB: Final = "Hugging Face"
LM_STUDIO: Final = "LM Studio"
OMLX: Final = "oMLX"
_HUB_FOLDER: Final = "models--"
_WEIGHTS: Final = "*.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_INDEX_BYTES_MAX: Final = 64 * 1024**2
_POINTER_BYTES_MAX: Final = 4096
_DEPTH_MAX: Final = 2  # a folder of models holds owner/name


POSITION_NAMES: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
)
UNKNOWN_LENGTH: Final = 1 << 40  # transformers writes a larger number for an unknown length


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A checkpoint on disk. Immutable."""

    name: str  # owner/name, as at the hub or in the program's folders
    directory: Path
    program: str  # one of HUB, LM_STUDIO, OMLX

    @property
    def source(self) -> str:
        """The value of MODEL_PATH: a hub id for a model in the hub's cache, else a path."""
        return self.name if self.program == HUB else str(self.directory)

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in weight_files(self.directory))

    @property
    def is_whole(self) -> bool:
        """Whether the disk has all weight files that the index or the cache's links name."""
        there = {name for name, _ in weight_files(self.directory)}
        linked = {path.name for path in self.directory.glob(_WEIGHTS) if path.is_symlink()}
        return bool(there) and linked | indexed_files(self.directory) <= there


def local_models(home: Path | None = None) -> list[FoundModel]:
    """Return all models on this disk, sorted by name; a model in two places is listed twice.

    `home` is the home directory whose folders are searched, by default this user's.
    """
    home = Path.home() if home is None else home
    found = [*hub_models(Path(constants.HF_HUB_CACHE))]
    seen: set[Path] = set()
    for folder, program in app_folders(home):
        for model in _below(folder, program):
            if (real := model.directory.resolve()) not in seen:
                seen.add(real)
                found.append(model)
    return sorted(found, key=lambda model: (model.name.lower(), model.program))


def hub_models(cache: Path) -> Iterator[FoundModel]:
    """Yield the models of the hub's cache that have a config at their ref `main`."""
    for folder in _folders(cache):
        if folder.name.startswith(_HUB_FOLDER):
            name = folder.name.removeprefix(_HUB_FOLDER).replace("--", "/", 1)
            snapshot = _snapshot(folder)
            if snapshot is not None and has_config(snapshot):
                yield FoundModel(name, snapshot, HUB)


def app_folders(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield (folder of models, program) for other programs; a folder may not exist."""
    homes = [home / ".lmstudio", home / ".cache/lm-studio"]
    try:
        pointed_home = _text(home / ".lmstudio-home-pointer", _POINTER_BYTES_MAX).strip()
        homes += [Path(pointed_home)] if pointed_home else []
    except (OSError, ValueError):
        pass
    yield from ((app_home / "models", LM_STUDIO) for app_home in homes)
    yield home / ".omlx/models", OMLX


def matching(name: str, models: list[FoundModel]) -> list[FoundModel]:
    """Return the models called `name`, in any case, with or without their owner.

    A model in several places is returned once, preferably from the hub's cache.
    """
    by_name: dict[str, FoundModel] = {}
    for model in sorted(_called(name, models), key=lambda model: model.program != HUB):
        by_name.setdefault(model.name.lower(), model)
    return list(by_name.values())


def matching_whole(name: str, models: list[FoundModel]) -> list[FoundModel]:
    """Return the models called `name` that are complete, each once."""
    return matching(name, [model for model in _called(name, models) if model.is_whole])


def _called(name: str, models: list[FoundModel]) -> list[FoundModel]:
    wanted = name.lower().removesuffix(":latest")
    whole = [model for model in models if model.name.lower() == wanted]
    if "/" not in wanted and not whole:
        whole = [model for model in models if model.name.lower().rpartition("/")[2] == wanted]
    return whole


def weight_files(directory: Path) -> list[tuple[str, int]]:
    """Return the existing weight files as (name, bytes)."""
    try:
        paths = sorted(directory.glob(_WEIGHTS))  # a link may be dangling
        return [(path.name, path.stat().st_size) for path in paths if path.is_file()]
    except OSError:
        return []


def indexed_files(directory: Path) -> set[str]:
    """Return the weight files that a checkpoint's index names; empty without an index."""
    try:
        index = json.loads(_text(directory / _INDEX, _INDEX_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return set()
    weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in names if isinstance(name, str)}


def _below(folder: Path, program: str, prefix: str = "", depth: int = 1) -> Iterator[FoundModel]:
    for child in _folders(folder):
        name = f"{prefix}{child.name}"
        if has_config(child):
            if weight_files(child):
                yield FoundModel(name, child, program)
        elif depth < _DEPTH_MAX:
            yield from _below(child, program, f"{name}/", depth + 1)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[:1] != ".")
    except (OSError, ValueError):  # missing, unreadable, or no valid path
        return []


def context_tokens(config: Mapping[str, Any], tokenizer_tokens: Any) -> int:
    """Return the context length in tokens from a config, or else from its tokenizer.

    UNKNOWN_LENGTH if neither has one.
    """
    text = config.get("text_config") or config
    found = [*(text.get(name) for name in POSITION_NAMES), tokenizer_tokens]
    known = [int(n) for n in found if isinstance(n, int | float) and 0 < n < UNKNOWN_LENGTH]
    return known[0] if known else UNKNOWN_LENGTH


def has_config(directory: Path) -> bool:
    try:
        return (directory / "config.json").is_file()
    except OSError:  # unreadable for this user
        return False


def _snapshot(folder: Path) -> Path | None:
    """Return the directory of a cached repository's main revision, or of its only revision."""
    try:
        sha = _text(folder / "refs/main", _POINTER_BYTES_MAX).strip()
    except (OSError, ValueError):
        sha = ""
    revisions = _folders(folder / "snapshots")
    named = [path for path in revisions if path.name == sha]
    if named:
        return named[0]
    return revisions[0] if len(revisions) == 1 else None


def _text(path: Path, bytes_max: int) -> str:
    """Return the text of a plain file, or of a link to one, as in the hub's cache."""
    if not path.is_file() or path.stat().st_size > bytes_max:
        raise ValueError(f"{path} is no file of at most {bytes_max:,} bytes")
    return path.read_text(encoding="utf-8")
