"""Estimates the memory that a model would take on this machine, before the model is fetched.

The verdict uses the same sums as a worker, so it matches the worker's later report. Only the memory
that a process takes besides its arrays is assumed, since there is no process to measure.

The size of the caches follows from the shapes in a model that is built from its config alone. MLX
arrays take no memory before they are evaluated, and this module evaluates neither the weights nor
the forward that fills the caches. So a model may be far larger than this machine.
Owner: the calling thread.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from hearth.shared.models.local_models import context_tokens
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import ModelFacts
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.compute_dtype import compute_in, computed_in, weight_sizes_of
from hearth.worker.engine.forward_memory import forward_of
from hearth.worker.engine.mlx_memory import fair_limit, working_bytes
from hearth.worker.engine.model_library import library_of
from hearth.worker.engine.model_loader import (
    LoadedModel,
    backend,
    cache_layout,
    config_dtype,
    dtype_choice,
)
from hearth.worker.engine.prefill_lengths import prefill_lengths
from hearth.worker.engine.row_tables import TableSizes, map_tables, table_sizes
from hearth.worker.engine.system_state import OVERHEAD_MAX
from hearth.worker.engine.vision.vlm_loader import read_json, sees_images
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.layer_kinds.kinds import probe_tokens
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.ranks.rank_hosts import read_hosts
from hearth.worker.ranks.sharded_model import split_model
from hearth.worker.setup.memory_setup import (
    CONTEXT_TOKENS_MIN,
    beside_bytes,
    encoders_bytes,
    fitting_tokens,
    workers_limit,
)

# mlx-lm's function that finds an architecture's classes; mlx-lm has no public name for it.
_known_classes: Final = inspect.signature(load_model).parameters["get_model_classes"].default
PROBE_TOKENS: Final = 3
_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def unloaded_model(directory: Path, context_max: int, weight_bytes: int) -> LoadedModel:
    """Return the model of `directory` without its weights; only its config must exist.

    The dtypes come from the weights if they exist, otherwise from the config.

    Raises:
        Exception: mlx-lm does not know the architecture, or the config is incomplete or too large
            (`library_of` tells that beforehand).
    """
    has_weights = next(directory.glob("model*.safetensors"), None) is not None
    classes = _known_classes if has_weights else _classes_without_weights
    model, config = load_model(directory, lazy=True, strict=False, get_model_classes=classes)
    map_tables(model, directory, config)
    if not has_weights:
        # A conversion casts the parameters, except those that the model's own predicate excludes.
        dtype = _DTYPES.get(config_dtype(config), mx.bfloat16)
        is_cast = getattr(model, "cast_predicate", lambda _name: True)
        cast = [
            (name, array.astype(dtype))
            for name, array in tree_flatten(model.parameters())
            if mx.issubdtype(array.dtype, mx.floating) and is_cast(name)
        ]
        model.update(tree_unflatten(cast))
        _pack(model, config)
    tokenizer_max = read_json(directory / "tokenizer_config.json").get("model_max_length")
    positions = context_tokens(config, tokenizer_max)
    facts = ModelFacts(
        name="",
        path=str(directory),
        architecture=str(config.get("model_type", "unknown")),
        context_tokens=min(positions, context_max),
        vocab_size=0,
        parameter_count=0,
        weight_bytes=weight_bytes,
        cache_layout=cache_layout(make_prompt_cache(model)),
        backend=backend(),
        model_tokens=positions,
        context_by="model" if positions <= context_max else "setting",
    )
    identity = WeightsIdentity(directory, is_hashed=False)
    return LoadedModel(model, None, {}, config, directory, identity, facts)


def as_computed(loaded: LoadedModel, settings: Settings, dense_max: int) -> LoadedModel:
    """Return the unloaded model, changed to the dtype that a worker would compute in.

    `dense_max` limits the bytes of dense weights on a CPU. All bytes of the weight files that are
    not of the language model count as a vision tower in 16 bits.
    """
    sizes, nbytes = weight_sizes_of(loaded.model), loaded.facts.weight_bytes
    tower = max(0, nbytes - sizes.own_bytes) if sees_images(loaded.directory) else 0
    whole = replace(sizes, dense_bytes=sizes.dense_bytes + 2 * tower)
    dtype = dtype_choice(settings, loaded.model, whole, loaded.config, dense_max)(None)
    if dtype.name == "float32" and dtype.is_cast:
        nbytes += tower
    compute_in(dtype, loaded.model, evaluates=False)
    computed = computed_in(dtype, whole, loaded.config)
    nbytes += sizes.growth(dtype)
    facts = replace(loaded.facts, weight_bytes=nbytes, computed_in=computed)
    return replace(loaded, facts=facts, dtype=dtype)


def unloaded_probe(model: nn.Module) -> list[Any]:
    """Return the unevaluated caches after a forward that fills each layer."""
    cache: list[Any] = make_prompt_cache(model)
    tokens = max(PROBE_TOKENS, probe_tokens(cache))
    model(mx.zeros((1, tokens), mx.int32), cache=cache)
    return cache


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, evaluated or not."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _classes_without_weights(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return an architecture's classes; the returned model class renames no weights."""
    model_class, arguments_class = _known_classes(config)
    whole = {"sanitize": lambda _self, weights: weights}
    return type(model_class.__name__, (model_class,), whole), arguments_class


def _pack(model: nn.Module, config: dict[str, Any]) -> None:
    """Quantise the layers that the config quantises, without evaluating anything."""
    quantization = config.get("quantization")
    if not isinstance(quantization, dict):
        return
    group_size = quantization["group_size"]

    def predicate(path: str, module: nn.Module) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return quantization.get(path, fits) if fits else False

    nn.quantize(
        model,
        group_size,
        quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=predicate,
    )


# Config field of models with latent KV. All heads share latent KV, so each rank keeps the whole.
LATENT_KV: Final = "kv_lora_rank"


@dataclass(frozen=True, slots=True)
class RankShare:
    """Holds rank 0's share of the weights, of the KV, and of a forward's scores."""

    weights: float = 1.0
    kv: float = 1.0
    score_parts: int = 1  # number of ranks that divide a forward's scores


@dataclass(frozen=True, slots=True)
class ImaginedGroup:
    """Stands in for MLX's process group while an unloaded model is split."""

    ranks: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks


def ranks_here(settings: Settings) -> int:
    """Return how many ranks of a model share this machine. Raises: StartError."""
    if settings.rank_hosts is None:
        return settings.ranks
    names = [host.name for host in read_hosts(settings.rank_hosts, settings.ranks)]
    return names.count(names[0])


def split_off(model: Any, config: dict[str, Any], settings: Settings) -> RankShare:
    """Split an unloaded model, and return rank 0's share.

    Raises:
        StartError: the model cannot be split in this way.
        Exception: the architecture's code failed.
    """
    if settings.ranks == 1:
        return RankShare()
    nbytes, layers = parameter_bytes(model), len(model.layers)
    split_model(model, config, ImaginedGroup(settings.ranks), settings.rank_split)
    weights = parameter_bytes(model) / max(1, nbytes)
    if settings.rank_split == "pipeline":
        return RankShare(weights, len(model.layers) / layers)
    is_latent = LATENT_KV in (config.get("text_config") or config)
    return RankShare(weights, 1.0 if is_latent else 1 / settings.ranks, settings.ranks)


SHORT_TOKENS, LONG_TOKENS = 32_768, 131_072  # contexts that a verdict names


@dataclass(frozen=True, slots=True)
class MemoryVerdict:
    """Holds the memory that a worker takes with this model, and the limits, in bytes. Immutable.

    For a model over several ranks, the figures are those of a rank on this machine.
    """

    machine_bytes: int
    limit: int  # memory limit of this worker
    weight_bytes: int
    beside_bytes: int
    reserve_bytes: int
    encoders_bytes: int = 0  # left free for EMBEDDING_MODEL and RERANK_MODEL
    model_tokens: int = 0  # context that the model was trained for; 0 = not known
    context_tokens: int = 0  # context that fits; 0 = not known, or less than CONTEXT_TOKENS_MIN
    context_by: str = ""  # "model" | "setting" | "memory"
    kv_bytes: Callable[[int], int] | None = None  # tokens of one sequence -> bytes of its KV
    forward_bytes: Callable[[int], int] | None = None  # depth of a prefill -> bytes of its forward
    ranks: int = 1  # ranks that compute the model together
    computed_in: str = ""  # as in ModelFacts
    unknown: str = ""  # reason why the size of the KV is not known
    refused: str = ""  # reason why no worker serves the model
    tables: TableSizes = TableSizes()  # weights that stay on the disk, besides `weight_bytes`

    @property
    def room_bytes(self) -> int:
        """Bytes left for KV and forwards; negative if the weights do not fit."""
        return self.limit - self.weight_bytes - self.beside_bytes - self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether a worker would start; if the size of the KV is unknown, only weights count."""
        is_room = self.weight_bytes <= self.limit - self.reserve_bytes
        return is_room and bool(self.unknown or self.context_tokens)


def memory_verdict(
    directory: Path, settings: Settings, weight_bytes: int, beside: int | None = None
) -> MemoryVerdict:
    """Return the verdict on the checkpoint in `directory`; only its config must exist.

    `weight_bytes` are the bytes of the weight files, downloaded or not. `beside` are the bytes that
    the process takes besides its arrays; the default is assumed for this machine.
    """
    beside = beside_bytes() if beside is None else beside
    tables = TableSizes()
    try:
        library = library_of(directory)
    except ValueError as error:
        return MemoryVerdict(*_sums(settings, weight_bytes, beside), refused=str(error))
    try:
        tables = table_sizes(directory, read_json(directory / "config.json"))
        weight_bytes -= tables.nbytes
        if library == "mlx-vlm":
            raise ValueError("mlx-vlm loads it, which builds no model without its weights")
        here = ranks_here(settings)
        limit = workers_limit(settings) if settings.ranks == 1 else 0
        dense_max = mlx_memory.dense_bytes_max(limit, settings.workers)
        loaded = unloaded_model(directory, settings.max_kv_size, weight_bytes)
        loaded = as_computed(loaded, settings, dense_max)
        weight_bytes = loaded.facts.weight_bytes
        layers = LayerMap(unloaded_probe(loaded.model))
        lengths = prefill_lengths(loaded)
        chunk = settings.prefill_chunk or lengths.chunk
        forward = forward_of(loaded, PrefillGrid(chunk, lengths.step_min, lengths.full_to))
        part = split_off(loaded.model, loaded.config, settings)  # last: this changes the model
    except Exception as error:  # an architecture or a config may fail in any way
        unknown = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, UnknownCache):
            unknown = f"its layers keep {error}"
        sums = _sums(settings, weight_bytes, beside)
        return MemoryVerdict(*sums, unknown=unknown, tables=tables)
    forward = replace(forward, pair_bytes=forward.pair_bytes // part.score_parts)
    own_bytes = round(weight_bytes * part.weights)
    sums = _sums(settings, own_bytes, beside, here)
    overhead = min(OVERHEAD_MAX, beside / max(1, own_bytes))
    kv_bytes = _kv_bytes(layers, settings, (1 + overhead) * part.kv)
    facts, limit = loaded.facts, sums[1]
    room = limit - own_bytes - beside - working_bytes(limit)
    tokens = fitting_tokens(facts.context_tokens, room, kv_bytes, forward)
    return MemoryVerdict(
        *sums,
        model_tokens=facts.model_tokens,
        context_tokens=tokens if tokens >= CONTEXT_TOKENS_MIN else 0,
        context_by=facts.context_by if tokens == facts.context_tokens else "memory",
        kv_bytes=kv_bytes,
        forward_bytes=forward.bytes_at,
        ranks=settings.ranks,
        computed_in=facts.computed_in,
        tables=tables,
    )


def _sums(
    settings: Settings, weight_bytes: int, beside: int, here: int = 1
) -> tuple[int, int, int, int, int, int]:
    """Return the first six fields of a verdict for a process that loads `weight_bytes`.

    `here` counts the ranks of each worker on this machine.
    """
    encoders = encoders_bytes(settings)
    total = workers_limit(settings) // here
    workers = max(1, settings.workers)
    others = (workers - 1) * weight_bytes
    limit = fair_limit(total, weight_bytes, others, workers)
    limit = limit if weight_bytes + others <= total else total // workers
    return mlx_memory.machine_bytes(), limit, weight_bytes, beside, working_bytes(limit), encoders


def _kv_bytes(layers: LayerMap, settings: Settings, factor: float) -> Callable[[int], int]:
    """Return a function from the length of a sequence to the bytes of its KV, times `factor`.

    `factor` is the system's overhead times this process's share of the KV.
    """
    packed = QuantFormat(settings.kv_bits, settings.kv_group_size) if settings.kv_bits else None

    def kv_bytes(tokens: int) -> int:
        form = packed if tokens >= settings.quantized_kv_start else None
        return round(layers.slot_bytes(tokens, form) * factor)

    return kv_bytes
