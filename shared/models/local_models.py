"""Finds the models on this disk: in the hub's cache, and in the folders of LM Studio and oMLX.

Reads names, sizes and index files. Loads nothing and asks no hub. A checkpoint's files are found as
a file system does that minds neither case nor spelling: on APFS and exFAT a loader that opens
`config.json` gets `Config.json`; others take full-width or otherwise composed letters for the same.
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
    """Return what in `directory` any of `patterns` names, in lower case, sorted."""
    wanted = tuple(patterns)
    return sorted(
        path
        for path in directory.glob("*")
        if any(fnmatchcase(_folded(path.name), each) for each in wanted)
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
_DEPTH_MAX: Final = 2  # owner/name below a folder of models


POSITION_NAMES: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
)
UNKNOWN_LENGTH: Final = 1 << 40  # transformers writes a larger one where a tokenizer tells none


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A checkpoint that was found on disk. Immutable."""

    name: str  # owner/name, as the hub or its folders have it
    directory: Path
    place: str  # one of HUB, LM_STUDIO, OMLX

    @property
    def source(self) -> str:
        """What MODEL_PATH takes for it: a hub id where the hub's cache has it."""
        return self.name if self.place == HUB else str(self.directory)

    @property
    def weight_bytes(self) -> int:
        return sum(size for _, size in weight_files(self.directory))

    @property
    def is_whole(self) -> bool:
        """Whether every file of weights is there that its index or a link of the cache names."""
        there = {name for name, _ in weight_files(self.directory)}
        linked = {path.name for path in self.directory.glob(_WEIGHTS) if path.is_symlink()}
        return bool(there) and linked | indexed_files(self.directory) <= there


def local_models(home: Path | None = None) -> list[FoundModel]:
    """Return all that is found, by name; a model in two places is there twice.

    `home` is whose folders are looked at, by default this user's.
    """
    home = Path.home() if home is None else home
    found = [*hub_models(Path(constants.HF_HUB_CACHE))]
    seen: set[Path] = set()
    for folder, place in app_folders(home):
        for model in _below(folder, place):
            if (real := model.directory.resolve()) not in seen:
                seen.add(real)
                found.append(model)
    return sorted(found, key=lambda model: (model.name.lower(), model.place))


def hub_models(cache: Path) -> Iterator[FoundModel]:
    """Yield the models of the hub's cache that have a config: what its ref `main` stands for."""
    for folder in _folders(cache):
        if folder.name.startswith(_HUB_FOLDER):
            name = folder.name.removeprefix(_HUB_FOLDER).replace("--", "/", 1)
            snapshot = _snapshot(folder)
            if snapshot is not None and has_config(snapshot):
                yield FoundModel(name, snapshot, HUB)


def app_folders(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield the folders in which other programs keep models, whether they are there or not."""
    homes = [home / ".lmstudio", home / ".cache/lm-studio"]
    try:
        told = _text(home / ".lmstudio-home-pointer", _POINTER_BYTES_MAX).strip()
        homes += [Path(told)] if told else []
    except (OSError, ValueError):
        pass
    yield from ((each / "models", LM_STUDIO) for each in homes)
    yield home / ".omlx/models", OMLX


def matching(name: str, models: list[FoundModel]) -> list[FoundModel]:
    """Return the models that `name` means, in any case: all of a name, or what is behind its owner.

    One that lies in several places is returned once, the hub's before others'.
    """
    by_name: dict[str, FoundModel] = {}
    for model in sorted(_called(name, models), key=lambda model: model.place != HUB):
        by_name.setdefault(model.name.lower(), model)
    return list(by_name.values())


def matching_whole(name: str, models: list[FoundModel]) -> list[FoundModel]:
    """Return those of `matching` that could be served: of one in several places a whole one."""
    return matching(name, [model for model in _called(name, models) if model.is_whole])


def _called(name: str, models: list[FoundModel]) -> list[FoundModel]:
    wanted = name.lower().removesuffix(":latest")
    whole = [model for model in models if model.name.lower() == wanted]
    if "/" not in wanted and not whole:
        whole = [model for model in models if model.name.lower().rpartition("/")[2] == wanted]
    return whole


def weight_files(directory: Path) -> list[tuple[str, int]]:
    """Return the files of weights that are there, each with its bytes."""
    try:
        paths = sorted(directory.glob(_WEIGHTS))  # of which a link's file may be gone
        return [(path.name, path.stat().st_size) for path in paths if path.is_file()]
    except OSError:
        return []


def indexed_files(directory: Path) -> set[str]:
    """Return the files of weights that a checkpoint's index names; none where it has no index."""
    try:
        index = json.loads(_text(directory / _INDEX, _INDEX_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return set()
    weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in names if isinstance(name, str)}


def _below(folder: Path, place: str, prefix: str = "", depth: int = 1) -> Iterator[FoundModel]:
    for each in _folders(folder):
        name = f"{prefix}{each.name}"
        if has_config(each):
            if weight_files(each):
                yield FoundModel(name, each, place)
        elif depth < _DEPTH_MAX:
            yield from _below(each, place, f"{name}/", depth + 1)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[:1] != ".")
    except (OSError, ValueError):  # not there, closed to this user, or no path at all
        return []


def context_tokens(config: Mapping[str, Any], tokenizer_tokens: Any) -> int:
    """Return the context of a config, whatever it calls it, or the tokenizer's, in tokens.

    UNKNOWN_LENGTH where neither tells one.
    """
    text = config.get("text_config") or config
    found = [*(text.get(name) for name in POSITION_NAMES), tokenizer_tokens]
    known = [int(n) for n in found if isinstance(n, int | float) and 0 < n < UNKNOWN_LENGTH]
    return known[0] if known else UNKNOWN_LENGTH


def has_config(directory: Path) -> bool:
    try:
        return (directory / "config.json").is_file()
    except OSError:  # closed to this user
        return False


def _snapshot(folder: Path) -> Path | None:
    """Return the directory of a cached repository's main revision, or of the only one."""
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
    """Return what a plain file says; the hub's cache has links to plain files."""
    if not path.is_file() or path.stat().st_size > bytes_max:
        raise ValueError(f"{path} is no file of at most {bytes_max:,} bytes")
    return path.read_text(encoding="utf-8")
