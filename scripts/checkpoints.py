"""What a tiny checkpoint with random weights is made of: files, a tokenizer, weights.

No function here knows an architecture; `make_fixture.py` and the tests make their models with them.
"""

import json
import math
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE: Final = 3_072

QWEN_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_TOKENS: Final = ("<|im_end|>", "<|endoftext|>")
# As in Qwen3 these are whole tokens but no control tokens: decoding shows them.
_VISIBLE_TOKENS: Final = frozenset(QWEN_TOKENS[3:9])


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` as a whole when the block ends well.

    Where another process was faster, its `target` stays and ours is dropped.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        made.mkdir()
        yield made
        for file in made.iterdir():
            _sync(file)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _sync(file: Path) -> None:
    """Wait until `file` is on disk, so that a power cut leaves no target with empty files."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def train_tokenizer(path: Path, added_tokens: Sequence[str], vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE of `vocab_size` tokens, trained on Python's standard library.

    `added_tokens` come last. Byte-level means that any text survives encoding and decoding.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added_tokens),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token not in _VISIBLE_TOKENS, normalized=False)
            for token in added_tokens
        ]
    )
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    tokenizer.save(str(path))


def added_token_ids(tokenizer_file: Path) -> dict[str, int]:
    """Return the ids of the tokens that were added to the trained ones."""
    rows = json.loads(tokenizer_file.read_text())["added_tokens"]
    return {row["content"]: row["id"] for row in rows}


def write_tokenizer_config(directory: Path, template: str, extra: Mapping[str, Any]) -> None:
    """Write what belongs beside `tokenizer.json`: its configuration and the chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    write_json(directory / "tokenizer_config.json", config | dict(extra))
    (directory / "chat_template.jinja").write_text(template)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def randomise(model: Any, seed: int = 0, head_gain: float = 6.0) -> None:
    """Fill `model` with random weights whose greedy output depends on the context.

    Plain initial values give flat attention and near-equal logits, so that a test of equality
    compares noise. Queries, keys and routers get a higher gain here, and the head `head_gain`.
    """
    draw = _Draw(seed)
    replace = partial(_random_weight, draw, head_gain)
    model.update(tree_map_with_path(replace, model.parameters()))
    mx.eval(model.parameters())


class _Draw:
    """Random arrays in a fixed order, apart from the thread's own random state."""

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)

    def _next_key(self) -> mx.array:
        self._key, key = mx.random.split(self._key)
        return key

    def normal(self, shape: tuple[int, ...], scale: float) -> mx.array:
        return mx.random.normal(shape, key=self._next_key()) * scale

    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> mx.array:
        return mx.random.uniform(low, high, shape, key=self._next_key())


def _random_weight(draw: _Draw, head_gain: float, path: str, weight: mx.array) -> mx.array:
    """Return the random array that replaces `weight`; `path` is its dotted name in the model."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    shape = weight.shape
    if "lm_head" in path:
        return draw.normal(shape, head_gain / math.sqrt(shape[-1]))
    if path.endswith("embed_tokens.weight"):
        return draw.normal(shape, 1.0)
    if "A_log" in path:  # decay rates of gated delta nets and Mamba
        return mx.log(draw.uniform(0.5, 4.0, shape))
    if path.endswith("dt_bias"):
        return draw.uniform(-3, -1, shape)
    if "e_score_correction_bias" in path or "sinks" in path:
        return draw.normal(shape, 0.1)
    if "norm" in path.lower():
        return weight + draw.normal(shape, 0.1)
    if weight.ndim >= 2:
        peaked = ("q_proj", "k_proj", "q_b_proj", "router", "gate.weight")
        gain = 2.0 if any(name in path for name in peaked) else 1.2
        fan_in = shape[-2] if "conv" in path else shape[-1]
        return draw.normal(shape, gain / math.sqrt(fan_in))
    return draw.normal(shape, 0.05)


def save_weights(directory: Path, parameters: Any) -> int:
    """Write `model.safetensors` from a tree of arrays; returns their bytes."""
    weights = dict(tree_flatten(parameters))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    return sum(weight.nbytes for weight in weights.values())
