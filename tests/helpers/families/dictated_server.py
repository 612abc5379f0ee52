"""Runs all of Hearth with a model that writes a family's cases, and asks it in every dialect.

It writes what it is told, by where its prompt ends: GPT-2's architecture with one block of zeros.
The logits of position p are the token table times (its token + GAIN * the row of `target[p]`), so
that target[p] is written whatever stood there, by some hundred logits. All else is real: server,
tokenizer, template, grammar, cache.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anthropic
import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from scripts.fixtures import checkpoint_files
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import TALKS, OllamaTalk, Sdks, Talk, Told
from tests.helpers.families.family_cases import TOOLS, WrittenFamily
from tests.helpers.servers.server import Server

DIALECTS: Final[dict[str, type[Talk]]] = {**TALKS, "ollama": OllamaTalk}
FILLER: Final = " a"  # one token of any family's tokenizer
WIDTH: Final = 64
GAIN: Final = 100
FIRST: Final = 1_536  # tokens of the shortest prompt that has a text behind it
SPARE: Final = 1_024  # positions behind the last text
# Name, rows and columns in WIDTHs; a norm has none.
LAYERS: Final = (
    *(("ln_1", 1, 0), ("attn.c_attn", 3, 1), ("attn.c_proj", 1, 1)),
    *(("ln_2", 1, 0), ("mlp.c_fc", 4, 1), ("mlp.c_proj", 1, 4)),
)


class DictatedServer(Server):
    """A server whose model writes the case that a prompt's length names."""

    def __init__(self, family: WrittenFamily) -> None:
        super().__init__(PROXY_MODEL_ID=MODEL, IDLE_PREFILL="never")
        directory = self.run_dir / "model"
        directory.mkdir()
        self.family = family
        self.starts = write_dictated_model(directory, family)
        self.environment["MODEL_PATH"] = str(directory)

    def told(self, name: str, dialect: str, *, stream: bool, choice: str = "") -> Told:
        """Have a case written, behind a prompt that is padded to the length that names it."""
        thinks = True if self.family.cases[name].reasoning else self.family.think
        told = self._asked("Go:", thinks, False, dialect, choice)
        missing = self.starts[name] - told.prompt
        assert missing >= 0, f"the prompt has {-missing} tokens too many: raise FIRST"
        told = self._asked("Go:" + FILLER * missing, thinks, stream, dialect, choice)
        assert told.prompt == self.starts[name], "a filler word is one token"
        return told

    def _asked(
        self, text: str, thinks: bool | None, stream: bool, dialect: str, choice: str
    ) -> Told:
        claude = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)
        with self.openai() as gpt, claude:
            talk = DIALECTS[dialect](Sdks(self, gpt, claude))
            talk.options |= {} if thinks is None else talk.thinking(thinks)
            tools = [tool["function"] for tool in TOOLS]
            return talk.user(text).ask(stream=stream, tools=tools, choice=choice)


def write_dictated_model(directory: Path, family: WrittenFamily) -> dict[str, int]:
    """Write the model of all cases of a family; return behind how many tokens each is written."""
    family.write_tokenizer(directory, **family.config)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    end = vocabulary[family.answer_end]
    target, starts = [end] * (FIRST - 1), {}
    for name, case in family.cases.items():
        starts[name] = len(target) + 1  # a prompt of n tokens ends at position n - 1
        ids = tokenizer.encode(case.text, add_special_tokens=False).ids
        target += [*ids, vocabulary[family.end_after(case)], end, end]
    target += [end] * SPARE
    checkpoint_files.save_weights(directory, _weights(target, len(vocabulary)))
    ends = {"eos_token_id": [vocabulary[each] for each in family.ends]}
    shape = {"n_ctx": len(target), "n_positions": len(target), "n_embd": WIDTH, "n_head": 1}
    config = {"model_type": "gpt2", "n_layer": 1, "layer_norm_epsilon": 1e-5, **shape, **ends}
    config["vocab_size"] = len(vocabulary)
    checkpoint_files.write_json(directory / "config.json", config)
    checkpoint_files.write_json(directory / "generation_config.json", ends)
    return starts


def _weights(target: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return GPT-2's arrays by name: tokens (vocabulary, WIDTH), positions (len(target), WIDTH)."""
    table = np.random.default_rng(7).normal(size=(vocab_size, WIDTH))
    table -= table.mean(1, keepdims=True)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    found = {"wte.weight": table, "wpe.weight": GAIN * table[list(target)]}
    found |= {"ln_f.weight": np.full(WIDTH, 30.0), "ln_f.bias": np.zeros(WIDTH)}
    for layer, rows, columns in LAYERS:
        shape = (rows * WIDTH, columns * WIDTH) if columns else WIDTH
        found |= {
            f"h.0.{layer}.weight": np.zeros(shape),
            f"h.0.{layer}.bias": np.zeros(rows * WIDTH),
        }
    return {f"model.{name}": mx.array(each.astype(np.float32)) for name, each in found.items()}
