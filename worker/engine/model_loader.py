"""Loads a model and its tokenizer, and reads what kind of model it is.

Owner: the inference thread, as MLX arrays belong to the thread that made them.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import (
    DEFAULT_ALLOW_PATTERNS,
    get_total_parameters,
    load,
    load_config,
    load_tokenizer,
    snapshot_download,
)

from hearth.shared.errors import StartError
from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.shared.models.local_models import UNKNOWN_LENGTH, context_tokens, files_like
from hearth.shared.models.model_path import named_model
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import ModelFacts
from hearth.worker.engine.compute_dtype import (
    ComputeDtype,
    WeightSizes,
    choose_dtype,
    choose_on_cpu,
    compute_in,
    computed_in,
    device_architecture,
    dtype_of,
    weight_sizes_of,
)
from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.engine.lora.lora_adapter import LoraAdapters
from hearth.worker.engine.mlx_memory import (
    dense_bytes_max,
    memory_limit,
    refuse_heavy,
    weight_bytes,
)
from hearth.worker.engine.model_library import library_of
from hearth.worker.engine.projection_caches import leave_out_projections
from hearth.worker.engine.row_tables import TableSizes, map_tables, row_tables
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from hearth.worker.engine.vision.vlm_loader import (
    VisionModel,
    chat_template,
    has_tower,
    load_language_model,
    load_vision_model,
    read_json,
    sees_images,
)
from hearth.worker.engine.weights_identity import WeightsIdentity

log = logging.getLogger(__name__)

PYTHON: Final = "*.py"
CODE_PATTERNS: Final = ("*.json", PYTHON)  # the files that `remote_code` reads
NAMED_MAX: Final = 8  # names in the text of a refusal
_CONFIGS: Final = "*config*.json"
# Loaders open these names, even if a file system lists the files under other spellings.
_OPENED: Final = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
_OFFLOADED: Final = "offload_index.json"
_CODE_KEYS: Final = ("model_file", "auto_map")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, its tokenizer, and the facts about them."""

    model: Any  # called as model(ids (1, n), cache=...) -> logits (1, n, vocabulary)
    tokenizer: Any  # mlx-lm's TokenizerWrapper
    generation_config: dict[str, Any]
    config: dict[str, Any]
    directory: Path
    identity: WeightsIdentity
    facts: ModelFacts
    vision: VisionModel | None = None  # None for a text-only model, of either library
    dtype: ComputeDtype = ComputeDtype()
    draft_model: DraftModel | None = None  # None = DRAFT_MODEL is empty
    adapters: LoraAdapters = LoraAdapters()

    @property
    def is_of_mlx_vlm(self) -> bool:
        """Whether mlx-vlm's code computes the model, with or without a vision tower."""
        return isinstance(self.model, VLMLanguageModel)


def load_model(
    settings: Settings,
    begin: Callable[[str, int], None] = lambda _step, _nbytes: None,
    admit: Callable[[int], None] | None = None,
    is_float16_good: Callable[[WeightsIdentity], bool | None] = lambda _identity: None,
    identify: Callable[[Path], WeightsIdentity] = WeightsIdentity,
    part: Any = None,
    dense_max: int | None = None,
) -> LoadedModel:
    """Load the model that MODEL_PATH names: the builtin model, a directory or a hub id.

    `begin` is called before each step, with its name and the bytes that it brings into memory.
    `admit` is called with the bytes of the weights before they are read, and raises StartError if
    they do not fit; by default the model may take the whole limit. `dense_max` is how many bytes a
    dense form may take on a CPU.
    `is_float16_good` returns the result of this machine's checks, for `choose_dtype`. `identify`
    starts to hash the weights of a directory before they are read. `part` (a Sharded of
    worker/ranks) loads a part of a text model instead; the facts are then those of the part.

    Raises:
        StartError: the model cannot be loaded; the text says why in one line.
    """
    source = str(named_model(settings.model_path))
    model: Any
    try:
        runs_code = may_run_code(settings, source)
        begin("files", 0)
        directory = present(source, runs_code, check=library_of)
        vision, (model, tokenizer, config) = _load(directory, runs_code, part)
        weights, network = _module_of(model, vision), _module_of(model, None)
        if type(network).__module__.startswith("mlx_vlm."):
            from hearth.worker.engine.cut_repairs import repair_cuts  # imports mlx-vlm

            repair_cuts(network)
            leave_out_projections(network)
        tables = map_tables(weights, directory, config)
        sizes = weight_sizes_of(weights)
        if dense_max is None:
            dense_max = dense_bytes_max(memory_limit(settings), settings.workers)
        choose = dtype_choice(settings, model, sizes, config, 0 if part else dense_max)
        nbytes = sizes.own_bytes if part is not None else weight_bytes(directory) - tables.nbytes
        nbytes += sizes.growth(choose(None))
        if admit is None:
            refuse_heavy(nbytes, settings.model_path, memory_limit(settings))
        else:
            admit(nbytes)
        identity = identify(directory)
        begin("weights", nbytes)
        if part is None:
            mx.eval(weights.parameters())  # read while the files are hashed
        begin("hashes", 0)
        identity.parts()
        dtype = choose(is_float16_good(identity))
        if part is not None:
            part.note_dtype(dtype)
        _compute_in(dtype, model, vision)
        mx.eval(weights.parameters())
        computed = computed_in(dtype, sizes, config)
    except StartError:
        raise
    except Exception as error:  # any error of a hub, a file, an architecture or the device
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StartError(f"MODEL_PATH is {source!r}, which cannot be loaded: {reason}") from error
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        generation_config=read_json(directory / "generation_config.json"),
        config=config,
        directory=directory,
        identity=identity,
        facts=_facts(model, weights, tokenizer, config, source, settings, computed, tables),
        vision=vision,
        dtype=dtype,
    )


def weights_of(loaded: LoadedModel) -> list[mx.array]:
    """Return all weights of a model, with those of its vision tower, draft model and adapters."""
    weights = _module_of(loaded.model, loaded.vision)
    arrays = [array for _, array in tree_flatten(weights.parameters())]
    if loaded.draft_model is not None:
        arrays += [array for _, array in tree_flatten(loaded.draft_model.head.parameters())]
    return arrays + loaded.adapters.arrays


def _module_of(model: Any, vision: VisionModel | None) -> Any:
    """Return upstream's module with all weights of a model, those of its vision tower too."""
    if vision is not None:
        return vision.model
    return model.model if isinstance(model, VLMLanguageModel) else model


def dtype_choice(
    settings: Settings, model: Any, sizes: WeightSizes, config: dict[str, Any], dense_max: int
) -> Callable[[bool | None], ComputeDtype]:
    """Return a function that chooses the dtype of `model`, by this machine's checks of float16.

    `sizes` include the vision tower. See `choose_dtype`.
    """
    if settings.dtype == "auto" and backend() == "cpu":
        on_cpu = choose_on_cpu(sizes, dense_max)
        return lambda _is_float16_good: on_cpu
    setting, checkpoint, named = settings.dtype, dtype_of(model), config_dtype(config)
    architecture = device_architecture()
    return lambda is_good: choose_dtype(setting, checkpoint, architecture, is_good, named)


def config_dtype(config: dict[str, Any]) -> str:
    """Return the dtype that a config names; "" if it names none."""
    parts = (config.get("text_config") or {}, config)
    values = (part.get(name) for part in parts for name in ("dtype", "torch_dtype"))
    return str(next(filter(None, values), ""))


def _compute_in(dtype: ComputeDtype, model: Any, vision: VisionModel | None) -> None:
    """Convert the model to `dtype`.

    A vision tower is cast to float32 only: its activations may exceed float16's range.
    """
    if vision is None:
        compute_in(dtype, _module_of(model, None))
    elif dtype.name == "float32":
        compute_in(dtype, vision.model)
    elif dtype.is_cast:
        compute_in(dtype, vision.language.model, vision.model)
        vision.language.input_dtype = getattr(mx, dtype.name)
    log.info("weights are computed in %s: %s", dtype.form, dtype.reason)


def may_run_code(settings: Settings, source: str) -> bool:
    """Whether ALLOW_MODEL_CODE names this model, by its hub id or its directory."""
    names = {source, str(Path(source).expanduser().resolve())}
    allowed = {str(Path(name).expanduser().resolve()) for name in settings.allow_model_code}
    return not names.isdisjoint({*settings.allow_model_code, *allowed})


def present(
    source: str,
    runs_code: bool,
    setting: str = "MODEL_PATH",
    check: Callable[[Path], object] = lambda _directory: None,
) -> Path:
    """Return the directory of the checkpoint `source`, fetched if it is a hub id.

    `setting` names the checkpoint in errors. Code in the checkpoint is found before anything
    loads it, and before the weights are fetched. Python files that may not run are not fetched.
    `check` reads the configuration before the weights are fetched, and raises if it is refused.

    Raises:
        StartError: the checkpoint brings code that ALLOW_MODEL_CODE does not allow.
    """
    directory = Path(source)
    if directory.is_dir():
        _refuse_code(directory, source, runs_code, setting)
        check(directory)
        return directory
    for patterns in (CODE_PATTERNS, DEFAULT_ALLOW_PATTERNS):
        wanted = [pattern for pattern in patterns if runs_code or pattern != PYTHON]
        directory = Path(snapshot_download(source, allow_patterns=wanted))
        _refuse_code(directory, source, runs_code, setting)
        check(directory)
    return directory


def _refuse_code(directory: Path, source: str, runs_code: bool, setting: str) -> None:
    found = [] if runs_code else remote_code(directory)
    if found:
        raise StartError(
            f"{setting} is {source!r}, which cannot be loaded: it brings code of its own "
            f"({', '.join(found)}), which would run with your rights. Use another conversion of "
            f"the model, or, if you have read that code, set ALLOW_MODEL_CODE={source}"
        )


def _load(
    directory: Path, runs_code: bool, part: Any
) -> tuple[VisionModel | None, tuple[Any, Any, dict[str, Any]]]:
    """Return the vision model, if there is one, and the language model, tokenizer and config."""
    if (directory / _OFFLOADED).is_file():
        raise ValueError(
            "it is a copy that mlx-vlm's moe_offload made: its experts fill the memory as they are "
            "used, beyond MEMORY_LIMIT_MB. Use the checkpoint that it was made from, if that fits."
        )
    if part is not None:
        return None, part.load(directory, runs_code)
    vision = load_vision_model(directory, runs_code) if sees_images(directory) else None
    if vision is None and library_of(directory) == "mlx-lm":
        return None, _load_text(directory, runs_code)
    language = vision.language if vision else load_language_model(directory, runs_code)
    config = load_config(directory)
    return vision, (language, text_tokenizer(directory, config, runs_code), config)


def _load_text(directory: Path, runs_code: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Return model, tokenizer and config as mlx-lm loads them. The weights are not read yet.

    Without mlx-vlm a vision model is loaded as its language model, if mlx-lm knows its kind.
    """
    misses_vision = not has_vision() and has_tower(directory)
    options = _tokenizer_options(directory, runs_code)
    try:
        loaded: tuple[Any, Any, dict[str, Any]] = load(
            str(directory),
            tokenizer_config=options,
            lazy=True,
            trust_remote_code=runs_code,
            return_config=True,
        )
    except Exception as error:
        if not misses_vision:
            raise
        raise ValueError(f"{error} It is a vision model: {VISION_REMEDY}.") from error
    if misses_vision:
        log.warning("images are refused: to serve this vision model with them, %s", VISION_REMEDY)
    return loaded


def text_tokenizer(directory: Path, config: dict[str, Any], runs_code: bool) -> Any:
    """Return the tokenizer of a checkpoint, loaded without the model."""
    options = _tokenizer_options(directory, runs_code)
    ends = config.get("eos_token_id") or (config.get("text_config") or {}).get("eos_token_id")
    return load_tokenizer(directory, options, eos_token_ids=ends)


def _tokenizer_options(directory: Path, runs_code: bool) -> dict[str, Any]:
    """Return the options to load a tokenizer with, and the template if it is in another file."""
    options: dict[str, Any] = {"trust_remote_code": runs_code}
    template = chat_template(directory)
    return options if template is None else {**options, "chat_template": template}


def _facts(
    model: Any,
    weights: Any,
    tokenizer: Any,
    config: dict[str, Any],
    source: str,
    settings: Settings,
    computed: str,
    tables: TableSizes,
) -> ModelFacts:
    """Return the facts of `model`. `weights` has the vision tower too."""
    size = (config.get("text_config") or config).get("vocab_size")
    positions = context_tokens(config, getattr(tokenizer, "model_max_length", None))
    if positions == UNKNOWN_LENGTH:
        log.warning("the checkpoint does not tell its context length; MAX_KV_SIZE alone limits it")
    return ModelFacts(
        name=settings.model_name,
        path=source,
        architecture=str(config.get("model_type", "unknown")),
        context_tokens=min(positions, settings.max_kv_size),
        # Without a size in the config, one forward gives the number of logits.
        vocab_size=int(size if isinstance(size, int) else model(mx.array([[0]])).shape[-1]),
        parameter_count=int(get_total_parameters(weights))
        + sum(table.parameter_count for table in row_tables(weights)),
        weight_bytes=sum(weight.nbytes for _, weight in tree_flatten(weights.parameters())),
        cache_layout=cache_layout(make_prompt_cache(model)),
        backend=backend(),
        model_tokens=positions,
        context_by="model" if positions <= settings.max_kv_size else "setting",
        computed_in=computed,
        tables=tables.sentence,
    )


def cache_layout(cache: list[Any]) -> str:
    """Return the classes of the layers' caches, e.g. "2 x ArraysCache, 2 x KVCache"."""
    kinds = Counter(_kind(layer) for layer in cache)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _kind(layer: Any) -> str:
    children = getattr(layer, "caches", None)
    if children is None:
        return type(layer).__name__
    return f"{type(layer).__name__}({', '.join(_kind(child) for child in children)})"


def backend() -> str:
    """Return MLX's backend: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def remote_code(directory: Path) -> list[str]:
    """Return the names of code in a checkpoint; empty for a checkpoint of data alone.

    It only reads: nothing is run or imported. Mlx-vlm runs a config's `model_file` without asking,
    and transformers run the files that an `auto_map` names, so this is called before both.
    """
    found = [path.name for path in files_like(directory, [PYTHON])]
    opened = {directory / name for name in _OPENED}
    for path in sorted(opened.union(files_like(directory, [_CONFIGS]))):
        found += [f"{key} in {path.name}" for key in _CODE_KEYS if key in set(_keys_set(path))]
    return found[:NAMED_MAX]


def _keys_set(path: Path) -> Iterator[str]:
    """Yield the keys, at any depth, that have a value in a JSON file."""
    try:
        nodes = [json.loads(path.read_bytes())]
    except (OSError, ValueError, RecursionError):
        return  # no loader can read the file either
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            yield from (name for name, inner in node.items() if inner)
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
