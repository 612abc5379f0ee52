"""Loads what DRAFT_MODEL names: an MTP head that mlx-vlm can drive, for a model that it loaded.

A head is a checkpoint of its own, or part of the one that it was trained with. All other kinds of
drafters are refused by name: they ask for hidden states of several layers, or for the model's KV.
Owner: the inference thread.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from hearth.shared.errors import StartError
from hearth.shared.model_path import named_model
from hearth.shared.optional_packages import VISION_REMEDY, has_vision
from hearth.shared.settings_from_env import POCKET, Settings
from hearth.worker.engine.compute_dtype import cast_rule, cast_to_float16
from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.engine.mlx_memory import weight_bytes
from hearth.worker.engine.model_loader import LoadedModel, may_run_code, present
from hearth.worker.engine.vision.vlm_loader import read_json, weight_sizes

log = logging.getLogger(__name__)

SETTING: Final = "DRAFT_MODEL"
KIND: Final = "qwen3_5_mtp"  # by mlx-vlm's name; heads of Qwen3.5, also with experts
_PART: Final = "mtp."  # names of a head's weights in the checkpoint that it was trained with


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A head that is here to be loaded."""

    source: str  # as DRAFT_MODEL has it
    directory: Path
    nbytes: int  # of its weights


def find_draft_model(settings: Settings) -> DraftCheckpoint | None:
    """Return what DRAFT_MODEL names, fetched where it is a hub id; None where it is empty.

    Raises:
        StartError: it is not there, brings code along, or is of a kind that cannot draft here.
    """
    source = settings.draft_model
    if not source:
        return None
    named = named_model(source, SETTING)
    if not has_vision():
        raise _refusal(source, f"mlx-vlm loads draft models: {VISION_REMEDY}")
    if named == POCKET:
        raise _refusal(source, f"it is no head of kind {KIND}")
    try:
        directory = present(str(named), may_run_code(settings, source), SETTING)
        nbytes = _head_bytes(directory, source)
    except StartError:
        raise
    except Exception as error:  # whatever a hub or a file can raise
        raise _refusal(source, _reason(error)) from error
    return DraftCheckpoint(source, directory, nbytes)


def load_draft_model(found: DraftCheckpoint, loaded: LoadedModel) -> DraftModel:
    """Load a head, and try it with the model that it is to draft for.

    Raises:
        StartError: it does not belong to this model.
    """
    if loaded.vision is None:
        raise _refusal(
            found.source,
            f"a draft model works with one that mlx-vlm loads, and MODEL_PATH is "
            f"{loaded.facts.path!r} ({loaded.facts.architecture}), a model of text alone",
        )
    try:
        model = DraftModel(_load(found, loaded), loaded.vision.model)
        if loaded.dtype.is_cast:
            cast_to_float16(model.head, cast_rule(model.head))
        mx.eval(model.head.parameters())
        model.measure(loaded.model)
    except Exception as error:  # whatever a file, an architecture or the device can raise
        raise _refusal(found.source, f"beside {loaded.facts.path!r}: {_reason(error)}") from error
    log.info("draft model=%s token_cost=%.2f", found.source, model.token_cost)
    return model


def _load(found: DraftCheckpoint, loaded: LoadedModel) -> Any:
    from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility

    assert loaded.vision is not None, found.source
    head, kind = load_drafter(str(found.directory))
    validate_drafter_compatibility(loaded.vision.model, head, kind)
    return head


def _head_bytes(directory: Path, source: str) -> int:
    """Return what a head's weights take; raise StartError where there is none of our kind."""
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    config = read_json(directory / "config.json")
    kind = str(config.get("model_type", "unknown"))
    if kind == KIND:
        return weight_bytes(directory)
    splitter = get_mtp_splitter(source_config=config)
    if splitter is None or splitter.output_model_type != KIND:
        raise _refusal(source, f"its kind is {kind!r}, and heads of kind {KIND} alone draft here")
    nbytes = sum(size for name, size in weight_sizes(directory) if name.startswith(_PART))
    if not nbytes:
        raise _refusal(source, f"this {kind!r} checkpoint has no weights named {_PART}*")
    return nbytes


def _refusal(source: str, reason: str) -> StartError:
    return StartError(
        f"{SETTING} is {source!r}, which cannot draft: {reason}. Name a head that was made for the "
        f"model, or leave {SETTING} empty."
    )


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
