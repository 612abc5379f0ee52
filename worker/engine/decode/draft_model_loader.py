"""Loads the model that DRAFT_MODEL names: a head or an assistant, with mlx-vlm.

A head is a checkpoint of its own, or a part of the checkpoint that it was trained with. Other kinds
of draft models are refused with the reason.
Owner: the inference thread.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from hearth.shared.errors import StartError
from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.shared.models.model_path import named_model
from hearth.shared.settings import Settings
from hearth.worker.draft.draft import ModelDrafts
from hearth.worker.engine.compute_dtype import compute_in
from hearth.worker.engine.decode.draft_model import (
    AssistantDrafts,
    DraftModel,
    HeadDrafts,
    RawRows,
    is_like_alone,
)
from hearth.worker.engine.model_loader import LoadedModel, backend, may_run_code, present
from hearth.worker.engine.vision.vlm_loader import only_known_code, read_json, weight_sizes

log = logging.getLogger(__name__)

SETTING: Final = "DRAFT_MODEL"


@dataclass(frozen=True, slots=True)
class DraftKind:
    """A kind of draft model: the class that drafts with it, and the architectures that it fits."""

    drafts: Callable[[DraftModel], ModelDrafts]
    models: tuple[str, ...]  # loaded by mlx-vlm, under its names
    text_models: tuple[str, ...] = ()  # text-only models, loaded by mlx-lm, under its names


_QWEN: Final = ("qwen3_5", "qwen3_5_moe")
_ASSISTANT: Final = DraftKind(
    AssistantDrafts, ("gemma4", "gemma4_unified"), ("gemma4", "gemma4_text")
)
KINDS: Final = {
    "qwen3_5_mtp": DraftKind(HeadDrafts, _QWEN, _QWEN),
    "nemotron_h_mtp": DraftKind(HeadDrafts, ("nemotron_h_nano_omni",)),
    "inkling_mtp": DraftKind(HeadDrafts, ("inkling",)),
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
}
_LAYERS: Final = "it reads hidden states of several layers, which are not handed out here"
_CACHES: Final = "its model's caches cannot be taken back to before a draft"
# The other kinds that mlx-vlm has, and why they cannot draft here.
REFUSED: Final = {
    "dflash2": _LAYERS,
    "dspark": _LAYERS,
    "eagle3": _LAYERS,
    "gemma4_dflash": _LAYERS,
    "gemma4_dspark": _LAYERS,
    "laguna_dflash": _LAYERS,
    "muse_glimmer_assistant": _LAYERS,
    "qwen3_dflash": _LAYERS,
    "qwen3_dspark": _LAYERS,
    "deepseek_v4_dspark": _LAYERS,
    "deepseek_v4_mtp": _CACHES,
    "glm5_next_mtp": _CACHES,
    "hy_v4_mtp": _CACHES,
    "qwen4_exp_mtp": _CACHES,
    "glm4_moe_lite_mtp": "mlx-vlm has no code that drafts with it",
    "glm_moe_dsa_mtp": "its model is one of text alone, which mlx-lm loads",
}
# How much weights grow in float32, by safetensors' dtype; quantised codes have 4 bits or
# more.
_WIDER: Final = {"BF16": 2, "F16": 2, "U32": 8}
_UNKNOWN: Final = "it is no draft model that mlx-vlm knows"


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft model on disk, not loaded yet."""

    source: str  # the value of DRAFT_MODEL
    directory: Path
    kind: str  # a key of KINDS
    nbytes: int  # upper bound of the weights' memory
    runs_code: bool = False  # whether the checkpoint's own code may run


def find_draft_model(settings: Settings) -> DraftCheckpoint | None:
    """Return the checkpoint that DRAFT_MODEL names, fetched if it is a hub id; None if it is empty.

    Raises:
        StartError: the checkpoint is not there, brings code, or is of a kind that cannot draft.
    """
    source = settings.draft_model
    if not source:
        return None
    named = named_model(source, SETTING)
    if not has_vision():
        raise _refusal(source, f"mlx-vlm loads draft models: {VISION_REMEDY}")
    try:
        runs_code = may_run_code(settings, source)
        directory = present(str(named), runs_code, SETTING)
        kind, sizes = _kind_and_sizes(directory, source)
    except StartError:
        raise
    except Exception as error:  # whatever a hub or a file can raise
        raise _refusal(source, _reason(error)) from error
    wider = _WIDER if settings.dtype == "auto" and backend() == "cpu" else {}
    nbytes = sum(size * wider.get(dtype, 1) for _, size, dtype in sizes)
    return DraftCheckpoint(source, directory, kind, nbytes, runs_code)


def load_draft_model(found: DraftCheckpoint, loaded: LoadedModel, raw_rows: RawRows) -> DraftModel:
    """Load a draft model, and try it with its target, the `loaded` model.

    `raw_rows` reads the target's KV.

    Raises:
        StartError: the draft model does not fit the target.
    """
    kind, path = KINDS[found.kind], loaded.facts.path
    target = loaded.model if loaded.vision is None else loaded.vision.model
    architecture = type(target).__module__.rpartition(".")[-1]  # as the loading library names it
    if architecture not in (kind.models if loaded.vision else kind.text_models):
        raise _refusal(found.source, _misfit(found.kind, kind, loaded))
    try:
        head = _load(found, target)
        own, known = head.config.text_config.vocab_size, loaded.facts.vocab_size
        if own > known:  # a drafted token beyond the vocabulary: MLX checks no index
            raise ValueError(f"it has {own:,} tokens, and the model has {known:,}")
        if not is_like_alone(loaded.model):
            raise ValueError("its hidden states cannot be had without other logits")
        model = DraftModel(head, target, drafts=kind.drafts, raw_rows=raw_rows)
        compute_in(loaded.dtype, model.head)
        mx.eval(model.head.parameters())
        model.measure(loaded.model)
    except Exception as error:  # whatever a file, an architecture or the device can raise
        raise _refusal(found.source, f"beside {path!r}: {_reason(error)}") from error
    log.info("draft model=%s token_cost=%.2f", found.source, model.token_cost)
    return model


def _load(found: DraftCheckpoint, target: Any) -> Any:
    from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility

    with only_known_code(found.runs_code):
        head, kind = load_drafter(str(found.directory))
    language = getattr(target, "language_model", target)
    if hasattr(language, "config"):
        validate_drafter_compatibility(target, head, kind)
        return head
    # Mlx-lm's models have `args` in place of `config`, and mlx-vlm does not check `args`.
    own = language.args.hidden_size
    read = getattr(head.config, "backbone_hidden_size", 0) or head.config.text_config.hidden_size
    if own != read:
        raise ValueError(f"it was made for hidden_size={read}, and the model has hidden_size={own}")
    return head


def _misfit(name: str, kind: DraftKind, loaded: LoadedModel) -> str:
    """Return the text of a refusal: the models that this kind fits, and the loaded one."""
    drafts = f"its kind {name!r} drafts for {_listed(kind.models)}"
    model = f"MODEL_PATH is {loaded.facts.path!r} ({loaded.facts.architecture})"
    if loaded.vision is not None:
        return f"{drafts}, and {model}"
    text = f", and of text alone {_listed(kind.text_models)}" if kind.text_models else ""
    return f"{drafts} with a vision tower{text}, and {model}, a model of text alone"


def _kind_and_sizes(directory: Path, source: str) -> tuple[str, list[tuple[str, int, str]]]:
    """Return a draft model's kind, and the names, bytes and dtypes of its weights.

    Raises:
        StartError: the kind is not in KINDS, or the weights are not there.
    """
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
    from mlx_vlm.utils import get_model_type

    config = read_json(directory / "config.json")
    kind = get_model_type(config) or "unknown"
    if kind in KINDS:
        return kind, list(weight_sizes(directory))
    splitter = get_mtp_splitter(source_config=config)
    if splitter is None or splitter.output_model_type not in KINDS:
        name = kind if splitter is None else splitter.output_model_type
        reason = REFUSED.get(name, _UNKNOWN)
        raise _refusal(source, f"its kind is {name!r}, and {reason}; {_listed(KINDS)} draft here")
    text = splitter.read_text_config(config)
    weights = [entry for entry in weight_sizes(directory) if splitter.select_keys(entry[0], text)]
    if not weights:
        raise _refusal(
            source, f"this {kind!r} checkpoint has no weights of a head, which conversions drop"
        )
    return splitter.output_model_type, weights


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _refusal(source: str, reason: str) -> StartError:
    return StartError(
        f"{SETTING} is {source!r}, which cannot draft: {reason}. Name one that was made for the "
        f"model, or leave {SETTING} empty."
    )


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
