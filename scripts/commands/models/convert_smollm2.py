"""Converts the GGUF file of SmolLM2 into a directory that MLX loads, with the file's own numbers.

MLX reads GGUF's Q4_1 and Q8_0 as what they are: codes, scale and bias of 32 weights. Only names
and the order of the rows of q and k are llama.cpp's.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL: Final = 3  # llama.cpp's type of a token that is no text
GROUP_SIZE: Final = 32
# What the template says where a client has no system message. With its makers' words these 4 bits
# answer "What is the capital of France?" in French every other time at the makers' temperature: of
# first words "The" has 0.55 then, "L" 0.36. Without any, a "Hello" is answered without an end.
_MAKERS_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_SYSTEM: Final = "You are a helpful AI assistant named SmolLM2. You give short and correct answers."


def convert(gguf: Path, directory: Path) -> None:
    """Write what is in `gguf`, whose digest was checked, into `directory`, which is empty."""
    loaded: Any = mx.load(str(gguf), return_metadata=True)
    weights, told = loaded
    heads = {
        "attn_q": told["llama.attention.head_count"].item(),
        "attn_k": told["llama.attention.head_count_kv"].item(),
    }
    named = {_name(name): row_order(name, array, heads) for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), named, {"format": "mlx"})
    _tokenizer(told).save(str(directory / "tokenizer.json"))
    template = told["tokenizer.chat_template"].replace(_MAKERS_SYSTEM, _SYSTEM)
    (directory / "chat_template.jinja").write_text(template)
    for name, row in _configs(told).items():
        (directory / name).write_text(json.dumps(row, indent=2) + "\n")


def _name(name: str) -> str:
    """Return what mlx-lm calls a tensor that llama.cpp calls `name`."""
    if not name.startswith("blk."):
        part, _, end = name.partition(".")
        return f"{_TOP[part]}.{end}"
    _, layer, part, end = name.split(".")
    return f"model.layers.{layer}.{_OF_LAYER[part]}.{end}"


def row_order(name: str, array: mx.array, heads: dict[str, int]) -> mx.array:
    """Take back llama.cpp's interleaving of the rows of q and k; `array` is (rows, columns)."""
    part = name.split(".")[-2]
    if part not in heads:
        return array
    pairs = array.reshape(heads[part], -1, 2, array.shape[-1])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _tokenizer(told: dict[str, Any]) -> Tokenizer:
    tokens = told["tokenizer.ggml.tokens"]
    kinds = told["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(row.split(" ")) for row in told["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in control])
    return made


def _configs(told: dict[str, Any]) -> dict[str, Any]:
    tokens = told["tokenizer.ggml.tokens"]
    begin, end = (told[f"tokenizer.ggml.{each}_token_id"].item() for each in ("bos", "eos"))
    quantisation = {
        "group_size": GROUP_SIZE,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": GROUP_SIZE, "bits": 8},
    }
    width = told["llama.embedding_length"].item()
    heads = told["llama.attention.head_count"].item()
    length = told["llama.context_length"].item()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": told["llama.feed_forward_length"].item(),
        "num_hidden_layers": told["llama.block_count"].item(),
        "num_attention_heads": heads,
        "num_key_value_heads": told["llama.attention.head_count_kv"].item(),
        "head_dim": width // heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": told["llama.rope.freq_base"].item(),
        "max_position_embeddings": length,
        "vocab_size": told["llama.vocab_size"].item(),
        "tie_word_embeddings": True,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "float32",
        "quantization": quantisation,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # it takes tokenizer.json as it is
        "bos_token": tokens[begin],
        "eos_token": tokens[end],
        "pad_token": tokens[end],
        "unk_token": tokens[0],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }
    generation = {
        "bos_token_id": begin,
        "eos_token_id": end,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }
    return {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "generation_config.json": generation,
    }
