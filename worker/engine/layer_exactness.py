"""Tells by a model's layers where KV that decoding wrote visibly differs from a prefill's.

Asked of what upstream built, not of names in a config. In float32 none differ beyond rounding.
"""

import sys
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

# Upstream's names for what a state-keeping layer computes its states by: a function that its file
# imports, or its own class. True: one token at a time, so that decoding leaves a prefill's bits.
# False: a scan in chunks counted from the forward's start (Mamba2). Log probabilities of bfloat16
# and 4 bits, decoded and prefilled: 0 for each True, 0.19 to 1.3 for each False.
RECURRENCES: Final = {
    "ssm_update": False,
    "gated_delta_update": True,  # Qwen3-Next, Qwen3.5, Olmo Hybrid, Kimi Linear
    "recurrent_gla": True,  # Bailing (Ring and Ling, linear)
    "MambaBlock": True,  # Mamba, Falcon Mamba
    "JambaMambaMixer": True,
    "RGLRU": True,  # RecurrentGemma
    "Rwkv7TimeMixing": True,
    "ShortConv": True,  # LFM2
}
# Multi-head latent attention has another formula for one token than for many: its products with
# weights of these kinds change places. 0.19 to 1.5, packed or not.
LATENT: Final = ("MultiLinear", "QuantizedMultiLinear")


def differs_when_decoded(model: Any, keeps_states: bool) -> bool:
    """Whether reusing what decoding wrote visibly changes the logits of `model`.

    `keeps_states` says that some of its layers keep states. A recurrence that nobody has measured
    counts as one that differs.
    """
    network = model if isinstance(model, nn.Module) else model.model  # VLMLanguageModel holds one
    modules = [module for _, module in network.named_modules()]
    kinds = {array.dtype for _, array in tree_flatten(model.parameters())}
    is_packed = any(hasattr(each, "bits") and hasattr(each, "group_size") for each in modules)
    if not is_packed and not kinds & {mx.float16, mx.bfloat16}:
        return False
    is_latent = any(type(module).__name__ in LATENT for module in modules)
    return is_latent or (keeps_states and not _goes_token_by_token(modules))


def _goes_token_by_token(modules: list[Any]) -> bool:
    """Whether these modules' files have recurrences that are known, and each goes so.

    Of code that came with a checkpoint there is no file: upstream enters it nowhere.
    """
    files = {type(module).__module__ for module in modules} & sys.modules.keys()
    names = {name for file in files for name in vars(sys.modules[file])}
    known = [RECURRENCES[name] for name in names & RECURRENCES.keys()]
    return bool(known) and all(known)
