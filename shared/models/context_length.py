"""Tells the longest context that a model was made for, by the files beside its weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.shared.models.builtin_models import builtin_model
from hearth.shared.models.local_models import local_models, matching_whole
from hearth.shared.models.model_path import named_model

POSITION_NAMES: Final = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
)
UNKNOWN_LENGTH: Final = 1 << 40  # transformers writes a larger one where a tokenizer tells none


def context_tokens(config: Mapping[str, Any], tokenizer_tokens: Any) -> int:
    """Return the context of a config, whatever it calls it, or the tokenizer's, in tokens.

    UNKNOWN_LENGTH where neither tells one.
    """
    text = config.get("text_config") or config
    found = [*(text.get(name) for name in POSITION_NAMES), tokenizer_tokens]
    known = [int(n) for n in found if isinstance(n, int | float) and 0 < n < UNKNOWN_LENGTH]
    return known[0] if known else UNKNOWN_LENGTH


def context_in_files(source: str) -> int | None:
    """Return the context of the model that `source` names, as MODEL_PATH does; None = not told.

    A builtin model's is known before it is fetched.
    """
    try:
        named = named_model(source)
        whole = [] if isinstance(named, Path) else matching_whole(named, local_models())
        directory = named if isinstance(named, Path) else whole[0].directory
        tokens = context_tokens(json.loads((directory / "config.json").read_bytes()), None)
    except (StartError, LookupError, OSError, ValueError, AttributeError, RecursionError):
        builtin = builtin_model(source)
        return None if builtin is None else builtin.context_tokens
    return tokens if tokens < UNKNOWN_LENGTH else None
