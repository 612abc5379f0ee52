"""Loads one rank's part of a model with the methods of mlx-lm's model classes.

`shard` gives a rank some heads and experts of every layer; `pipeline` gives it some of the layers.
Both run before any weights are read, so that a rank reads only its part.
Owner: the inference thread.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import get_total_parameters, load_model

from hearth.shared.errors import StartError
from hearth.worker.engine.compute_dtype import ComputeDtype
from hearth.worker.engine.model_library import library_of
from hearth.worker.engine.model_loader import LoadedModel, text_tokenizer
from hearth.worker.engine.vision.vlm_loader import read_json
from hearth.worker.ranks.rank_link import difference

# Counts in a config that must be divisible by the number of ranks when layers are split.
_SPLIT_COUNTS: Final = (
    *("num_attention_heads", "num_key_value_heads"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)


_WHOLE: Final = (
    "RANKS is {count}, and mlx-lm cannot split models of type {kind!r} over ranks (docs/ranks.md "
    "lists those that it can). Set RANKS=1."
)


class Sharded:
    """Loads this rank's part of a text model, for `load_model`."""

    def __init__(
        self,
        group: mx.distributed.Group,
        split: str,
        on_dtype: Callable[[ComputeDtype], None] = lambda _dtype: None,
    ) -> None:
        """`split` is RANK_SPLIT; `on_dtype` receives the dtype of the computation."""
        self._group = group
        self._split = split
        self.note_dtype = on_dtype
        self.parameter_count = 0  # parameters of the whole model

    def load(self, directory: Path, runs_code: bool) -> tuple[Any, Any, dict[str, Any]]:
        """Return this rank's language model (weights not read yet), its tokenizer and config.

        Raises:
            StartError: the model cannot be split this way.
        """
        if library_of(directory) == "mlx-vlm":
            kind = read_json(directory / "config.json").get("model_type")
            raise StartError(_WHOLE.format(count=self._group.size(), kind=kind))
        model, config = load_model(directory, lazy=True, trust_remote_code=runs_code)
        self.parameter_count = int(get_total_parameters(model))
        split_model(model, config, self._group, self._split)
        return model, text_tokenizer(directory, config, runs_code), config


def split_model(model: Any, config: Mapping[str, Any], group: Any, split: str) -> None:
    """Reduce a model to the part of this rank of `group`; `split` is RANK_SPLIT.

    Raises:
        StartError: the model cannot be split this way.
    """
    kind = str(config.get("model_type", "unknown"))
    if split == "pipeline":
        network: Any = getattr(model, "model", None)
        if not hasattr(network, "pipeline"):
            raise StartError(
                f"RANK_SPLIT is pipeline, and mlx-lm has no pipeline for models of type {kind!r} "
                "(docs/ranks.md lists those that have one). Set RANK_SPLIT=tensor."
            )
        network.pipeline(group)
        return
    if not hasattr(model, "shard"):
        raise StartError(_WHOLE.format(count=group.size(), kind=kind))
    text = config.get("text_config") or config
    for name in _SPLIT_COUNTS:
        if (text.get(name) or 0) % group.size():
            raise StartError(
                f"RANKS is {group.size()}, and the model has {name}={text[name]}, which "
                "is no multiple of it. Set RANKS to a divisor of that."
            )
    model.shard(group)


REMEDIES = {
    "dtype": "Set DTYPE to bfloat16 or float16: auto goes by each machine's chip.",
    "files": "Fetch the model anew where it is older: hearth pull.",
}


def model_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Return the facts that must be equal on all ranks. Waits until the weights are hashed.

    Raises: OSError, SystemExit, as in `WeightsIdentity.parts`.
    """
    files = dict(part.rsplit(" ", 1) for part in loaded.identity.parts())
    return {"dtype": loaded.dtype.name, **files}


def check_same_model(
    own: Mapping[str, Any], others: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> None:
    """Compare rank 0's facts with `others`, the facts of ranks 1 and up. Raises: StartError."""
    for rank, facts in enumerate(others, 1):
        if wrong := difference(own, facts):
            remedy = REMEDIES["dtype" if own["dtype"] != facts.get("dtype") else "files"]
            name = f"Rank {rank} of {len(hosts)} ({hosts[rank]})"
            raise StartError(f"{name} cannot take part: {wrong}. {remedy}")
