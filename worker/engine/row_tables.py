"""Keeps embedding tables out of memory: a token reads the few rows that it needs from their files.

N-gram tables are large: those of Qwen3.8-Flash-Next hold 51 billion numbers beside its 126 billion.
The files are mapped, so that the rows in use are in the system's cache, which shrinks when memory
is short. Upstream's own mappings are not used: `ple_storage` needs a second checkpoint of 4 bits,
engrams stand among the parameters once a model is loaded, and both let one thread wait for each
page and read on behind it: 296 ms for 48 cold rows on a Linux disk, where this takes 1.3 ms.
Owner: the inference thread, which waits for the rows of a forward.
"""

import functools
import logging
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from hearth.shared.models.local_models import files_like
from hearth.worker.engine.vision.vlm_loader import safetensors_header

log = logging.getLogger(__name__)

READERS_MAX: Final = 16  # an SSD reads that many pages at once in little more time than one
_READERS: Final = ThreadPoolExecutor(READERS_MAX, "tables")  # threads begin with the first rows
ROWS_MIN: Final = 4  # rows of one reader: fewer cost more than they save
# Names of the tables of qwen4_exp (in shards), deepseek_v41 and longcat_flash_ngram, as modules or,
# with a part, as weights in files.
_NAME: Final = re.compile(
    r"((?<!mtp\.)layers\.\d+\.(?:ple\.ple_embedding\.ngram_embedding|engram\.embed)"
    r"|ngram_embeddings\.embedders\.\d+)"
    r"(?:\.shards?[._](\d+))?(?:\.(weight|scales?|biases))?$"
)
_FIXED: Final = "engram"  # tables whose rows are bfloat16 whatever the model computes in
_PARTS: Final = ("weight", "scales", "biases")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]  # (rows, bytes of a row)
TablePart = tuple[str, int, str]  # table, shard, "weight" | "scales" | "biases"


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The bytes of a checkpoint's tables that stay on the disk, and what a token reads of them."""

    nbytes: int = 0
    token_rows: int = 0
    token_bytes: int = 0

    @property
    def sentence(self) -> str:
        """What the tables take, in words; "" without tables."""
        if not self.nbytes:
            return ""
        gb, kb = self.nbytes / 1e9, self.token_bytes / 1e3
        return f"{gb:.1f} GB of tables on the SSD, read by row: {kb:.1f} KB a token"


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int  # of all tables, near enough for a checkpoint that is not here yet
    row_items: int
    token_rows: int  # rows that a token reads


def _ple(text: Mapping[str, Any]) -> _Shape:
    heads = (text.get("ngram_size", 3) - 1) * text.get("heads_per_ngram", 8)
    lookups = heads * len(set(text.get("ple_layer_ids") or ()))
    items = (text.get("ple_embed_dim") or text["hidden_size"]) // heads
    return _Shape(lookups * text.get("ngram_vocab_size_base", 20_000_000), items, lookups)


def _engrams(text: Mapping[str, Any]) -> _Shape:
    heads = (text.get("engram_max_ngram_size", 4) - 1) * text.get("engram_n_heads", 8)
    lookups = heads * len(text.get("engram_layer_ids", (1, 14)))
    rows = sum(text.get("engram_num_embeddings", (384_006_168, 384_016_682)))
    return _Shape(rows if lookups else 0, text.get("engram_head_dim", 256), lookups)


def _embedders(text: Mapping[str, Any]) -> _Shape:
    count = text.get("emb_split_num", 4) * (text.get("emb_neighbor_num", 4) - 1)
    rows = count * text.get("ngram_vocab_size_ratio", 78) * text["vocab_size"]
    return _Shape(rows, text["hidden_size"] // count, count)


_SHAPES: Final[Mapping[str, Callable[[Mapping[str, Any]], _Shape]]] = {
    "qwen4_exp": _ple,
    "deepseek_v41": _engrams,
    "longcat_flash_ngram": _embedders,
}


def table_sizes(directory: Path, config: Mapping[str, Any]) -> TableSizes:
    """Return the sizes of the tables in the files of `directory`, or as `config` tells them.

    Without weight files, only a conversion's tables are known: others may be stored in any form.

    Raises:
        OSError, ValueError, KeyError: a file or the config is damaged.
    """
    shape_of = _SHAPES.get(str(config.get("model_type")).removesuffix("_text"))
    if shape_of is None:
        return TableSizes()
    shape = shape_of({**config, **(config.get("text_config") or {})})
    rows, nbytes = shape.rows, shape.rows * _row_bytes(config, shape.row_items)
    if files_like(directory, ["*.safetensors"]):
        found = _parts_in(directory)
        nbytes = sum(part.nbytes for part in found.values())
        rows = sum(part.rows for (_, _, name), part in found.items() if name == "weight")
    if not (nbytes and shape.token_rows):
        return TableSizes()
    return TableSizes(nbytes, shape.token_rows, nbytes // rows * shape.token_rows)


def _row_bytes(config: Mapping[str, Any], items: int) -> int:
    """Return the bytes of a row of `items` numbers; 0 if the config does not tell its form."""
    told: Mapping[str, Any] = config.get("quantization") or {}
    packing = next((told[name] for name in told if _NAME.search(name)), told)
    if not packing:
        return 0 if config.get("quantization_config") else 2 * items
    group_bytes = 4 if packing.get("mode", "affine") == "affine" else 1  # scale and bias, or scale
    return items * packing["bits"] // 8 + items // packing["group_size"] * group_bytes


@dataclass(frozen=True, slots=True)
class _FilePart:
    path: Path
    offset: int
    nbytes: int
    rows: int


def _parts_in(directory: Path) -> dict[TablePart, _FilePart]:
    """Return where the files of `directory` have their tables.

    Tables of 8-bit floats that one number scales are left out: upstream makes others of them.
    """
    found: dict[TablePart, _FilePart] = {}
    unscaled: set[TablePart] = set()
    for path in files_like(directory, ["*.safetensors"]):
        start, header = safetensors_header(path)
        for name, entry in header.items():
            match = _NAME.search(name)
            if match is None or match[3] is None:
                continue
            key = (match[1], int(match[2] or 0), "scales" if match[3] == "scale" else match[3])
            begin, end = entry["data_offsets"]
            found[key] = _FilePart(path, start + begin, end - begin, entry["shape"][0])
            if entry["dtype"].startswith("F8") and key[2] == "weight":
                unscaled.add(key)
    for table, shard, _ in [key for key in unscaled if (*key[:2], "scales") not in found]:
        del found[table, shard, "weight"]
    return found


class RowTable(nn.Module):
    """Looks rows up in mapped files, as upstream's embedding does in memory. It has no weights.

    `like` has the dtype of the rows: what casts a model casts it too.
    """

    def __init__(
        self,
        shards: Sequence[Mapping[str, Bytes]],
        dtypes: Mapping[str, mx.Dtype],
        packing: Mapping[str, Any],
        fixed: mx.Dtype | None,
        token_rows: int,
    ) -> None:
        """`shards` follow each other; their parts are of `dtypes`, and packed as `packing` says.

        `fixed` is the dtype of the rows where the model does not choose it.
        """
        super().__init__()
        self._shards, self._dtypes, self._packing, self._fixed = shards, dtypes, packing, fixed
        self._starts = np.cumsum([0, *(len(shard["weight"]) for shard in shards)])
        self.token_rows = token_rows
        floats = [dtype for dtype in dtypes.values() if mx.issubdtype(dtype, mx.floating)]
        if fixed is None:
            self.like = mx.zeros((1,), floats[0] if floats else mx.bfloat16)

    @property
    def row_count(self) -> int:
        return int(self._starts[-1])

    @property
    def parameter_count(self) -> int:
        """How many numbers the table has, unpacked."""
        bits: int = self._packing.get("bits", 8 * self._dtypes["weight"].size)
        return sum(shard["weight"].nbytes for shard in self._shards) * 8 // bits

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for shard in self._shards for part in shard.values())

    def __call__(self, indices: mx.array) -> mx.array:
        """Return the rows of `indices` (...) as (..., numbers of a row)."""
        wanted = np.asarray(indices)
        rows, places = np.unique(wanted, return_inverse=True)
        assert rows[0] >= 0 and rows[-1] < self.row_count, (rows[0], rows[-1], self.row_count)
        dtype = self._fixed or self.like.dtype
        parts = {
            name: mx.array(read).view(self._dtypes[name]) for name, read in self.read(rows).items()
        }
        floats = {
            name: part.astype(dtype)
            for name, part in parts.items()
            if mx.issubdtype(part.dtype, mx.floating)
        }
        parts |= floats
        values = parts["weight"]
        if self._packing:
            values = mx.dequantize(values, parts["scales"], parts.get("biases"), **self._packing)
        return values.astype(dtype)[mx.array(places.reshape(wanted.shape))]

    def read(self, rows: np.ndarray[Any, Any]) -> dict[str, Bytes]:
        """Return the bytes of each part of `rows`, which ascend.

        Several threads touch the pages: a thread that needs a page from the disk waits for it.
        """
        into = {
            name: np.empty((len(rows), part.shape[1]), np.uint8)
            for name, part in self._shards[0].items()
        }
        step = max(ROWS_MIN, -(-len(rows) // READERS_MAX))
        ends = np.searchsorted(rows, self._starts)
        jobs = [
            (shard, rows[at : min(at + step, end)] - start, at)
            for shard, start, begin, end in zip(
                self._shards, self._starts[:-1], ends, ends[1:], strict=False
            )
            for at in range(begin, end, step)
        ]

        def copy(job: tuple[Mapping[str, Bytes], np.ndarray[Any, Any], int]) -> None:
            shard, local, at = job
            for name, part in shard.items():  # without "clip" numpy copies twice
                np.take(part, local, 0, into[name][at : at + len(local)], "clip")

        run = map if len(jobs) == 1 else _READERS.map  # handing over costs more than a row
        list(run(copy, jobs))
        return into


def row_tables(model: Any) -> list[RowTable]:
    """Return the tables of a model that are read by row."""
    return [module for _, module in _network(model).named_modules() if isinstance(module, RowTable)]


def _network(model: Any) -> nn.Module:
    """Return upstream's module, which a VLMLanguageModel holds."""
    network: nn.Module = model if isinstance(model, nn.Module) else model.model
    return network


def map_tables(model: Any, directory: Path, config: Mapping[str, Any]) -> TableSizes:
    """Have the tables of `model` be read by row from the files of `directory`; return their sizes.

    No weight of the model may have been evaluated yet. Tables that upstream holds in another form
    than the files stay in the model, and the sizes are then none.
    """
    sizes = table_sizes(directory, config)
    network = _network(model)
    found = [(name, module, _NAME.search(name)) for name, module in network.named_modules()]
    named = [(name, module, match[1]) for name, module, match in found if match and not match[2]]
    if not (sizes.nbytes and named):  # upstream maps those of a copy with `ple_storage` itself
        return sizes
    parts, mapped = _parts_in(directory), functools.cache(_mapped)
    rows = sizes.token_rows // len(named)
    tables = [(name, _table(module, key, parts, mapped, rows)) for name, module, key in named]
    if any(table is None for _, table in tables):
        log.warning("the tables of this model are held in memory: its files have another form")
        return TableSizes()
    network.update_modules(tree_unflatten(tables))
    return sizes


def _table(
    module: Any,
    key: str,
    files: Mapping[TablePart, _FilePart],
    mapped: Callable[[Path], Bytes],
    token_rows: int,
) -> RowTable | None:
    """Return upstream's table `module` over its `files`; None if these are not what it holds."""
    shards: list[dict[str, Bytes]] = []
    dtypes: dict[str, mx.Dtype] = {}
    first, *_ = held = getattr(module, "shards", [module])
    for number, part in enumerate(held):
        shards.append({})
        for name in (each for each in _PARTS if each in part.parameters()):
            file, array = files.get((key, number, name)), part[name]
            if file is None or file.nbytes != array.nbytes:
                return None
            whole = mapped(file.path)[file.offset : file.offset + file.nbytes]
            shards[-1][name] = whole.reshape(array.shape[0], -1)
            dtypes[name] = array.dtype
    form = ("group_size", "bits", "mode") if hasattr(first, "bits") else ()
    packing = {name: getattr(first, name) for name in form}
    return RowTable(shards, dtypes, packing, mx.bfloat16 if _FIXED in key else None, token_rows)


def _mapped(path: Path) -> Bytes:
    """Return the bytes of a file. Only pages that are touched are read, each alone."""
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(whole, np.uint8)
