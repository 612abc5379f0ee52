"""Makes draft models, random ones and ones that know what is said, and drafts with them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from hearth.worker.draft.draft import NO_DRAFT, Draft, ModelDrafts, chain
from scripts.fixtures import checkpoint_files

KIND = "qwen3_5_mtp"


def head_config(model_config: dict[str, Any], **text: Any) -> dict[str, Any]:
    """Return the config.json of a head for a Qwen with such a config.json."""
    spoken = model_config.get("text_config", model_config)
    return {"model_type": KIND, "text_config": spoken | {"mtp_num_hidden_layers": 1} | text}


def random_draft_model(config: dict[str, Any], seed: int = 0) -> Any:
    """Return mlx-vlm's draft model with such a config.json."""
    from mlx_vlm.utils import get_model_and_args

    module, _ = get_model_and_args(copy.deepcopy(config))
    model = module.Model(module.ModelConfig.from_dict(copy.deepcopy(config)))
    checkpoint_files.randomise(model, seed)
    return model


def random_head(model_config: dict[str, Any], seed: int = 0, **text: Any) -> Any:
    return random_draft_model(head_config(model_config, **text), seed)


def save_draft_model(directory: Path, config: dict[str, Any]) -> Path:
    """Write a random draft model as a checkpoint of its own; return its directory."""
    directory.mkdir()
    checkpoint_files.save_weights(directory, random_draft_model(config).parameters())
    checkpoint_files.write_json(directory / "config.json", config)
    return directory


def save_head(directory: Path, model_config: dict[str, Any], **text: Any) -> Path:
    return save_draft_model(directory, head_config(model_config, **text))


class KnowingHead:
    """Says what a text goes on with, and remembers by place what it was given to read of it.

    It asserts that nothing but the text was, in order. Copies share what they read.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)
        self.read: list[tuple[int, mx.array]] = []  # the place of a token, its hidden state (n,)
        self.begun: list[int] = []  # the places that it began at
        self._next = 0
        self._drafted = 0

    def know(self, text: Sequence[int]) -> None:
        """Know this text from now on, in all copies."""
        self._text[:] = text

    def reset(self, target: Any) -> None:
        self.read.clear()
        self._drafted = 0

    def set_shared_kv(self, shared: dict[str, Any], place: int) -> None:
        assert not shared
        self.begun.append(place)
        self._next = place

    def accept_verified_tokens(
        self,
        hidden: mx.array,
        tokens: mx.array,
        accepted: int,
        new_tokens: list[int],
        *_: Any,
        greedy: bool,
    ) -> None:
        assert greedy
        self._drafted = min(self._drafted, accepted)
        behind = [*tokens[0].tolist(), *new_tokens]  # type: ignore[misc]
        assert not self._drafted, "the head's own pairs give way"
        assert len(behind) == hidden.shape[1] == accepted + len(new_tokens)
        for at, token in enumerate(behind):
            assert token == self._text[self._next + 1], self._next
            self.read.append((self._next, hidden[0, at]))
            self._next += 1

    def draft_block(
        self, last: int, _hidden: mx.array, _cache: Any, block_size: int, *_: Any, greedy: bool
    ) -> mx.array:
        assert greedy
        assert last == self._text[self._next]
        self._drafted = block_size - 2
        said = self._text[self._next + 1 : self._next + block_size]
        return mx.array([[*said, *[0] * (block_size - 1 - len(said))]])


class KnowingAssistant:
    """Says what a text goes on with, and remembers the KV that it was shown, by place."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = list(text)
        self.shown: list[tuple[int, dict[str, tuple[mx.array, mx.array]]]] = []
        self.hidden: list[mx.array] = []  # (1, 1, hidden), of the token before each place
        self.place: int | None = None  # of the KV that it holds

    def reset(self, target: Any) -> None:
        self.place = None

    def set_shared_kv(
        self,
        shared: dict[str, tuple[mx.array, mx.array]],
        place: int,
        position: int | None = None,
        kv_valid_len: int | None = None,
    ) -> None:
        self.place = place if shared else None
        if shared:
            assert (position, kv_valid_len) == (place - 1, place)
            copies = {name: tuple(mx.array(a) for a in pair) for name, pair in shared.items()}
            mx.eval(copies)
            self.shown.append((place, copies))  # type: ignore[arg-type]

    def draft_block(
        self, last: int, hidden: mx.array, _cache: Any, block_size: int, *_: Any, greedy: bool
    ) -> mx.array:
        assert greedy and self.place is not None, "KV is shown to it for each draft anew"
        assert last == self._text[self.place]
        self.hidden.append(hidden)
        said = self._text[self.place + 1 : self.place + block_size]
        return mx.array([[*said, *[0] * (block_size - 1 - len(said))]])


class LyingDrafts:
    """Has a draft model's tokens be wrong where `lies` says so, by their place in the answer."""

    token_cost = 0.0

    def __init__(self, drafts: ModelDrafts, lies: Sequence[bool], prompt_tokens: int) -> None:
        self._drafts, self._lies, self._prompt_tokens = drafts, lies, prompt_tokens

    def take(self, start: int, tokens: mx.array, hidden: mx.array) -> None:
        self._drafts.take(start, tokens, hidden)

    def look_at(self, cache: Any) -> None:
        self._drafts.look_at(cache)

    def draft(self, place: int, last: int, tokens_max: int) -> list[int]:
        drafted = self._drafts.draft(place, last, tokens_max)
        first = place + 1 - self._prompt_tokens
        return [token ^ self._lies[first + at] for at, token in enumerate(drafted)]


class AskingDrafter:
    """Asks a draft model alone, each time, for drafts of these lengths in turn."""

    def __init__(self, model: ModelDrafts, prompt_tokens: int, lengths: Sequence[int]) -> None:
        self.model = model
        self._place = prompt_tokens - 1
        self._lengths = list(lengths)
        self._rounds = 0
        self.taken: list[int] = []
        self.drafts: list[list[int]] = []
        self.places: list[int] = []  # of the last known token before each draft
        self.drafted = self.accepted = self.refused = 0

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens

    def is_promising(self) -> bool:
        self._rounds += 1
        return self._lengths[self._rounds % len(self._lengths)] > 0

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        wanted = min(tokens_max, self._lengths[self._rounds % len(self._lengths)])
        if not wanted:
            return NO_DRAFT
        self.places.append(self._place + len(self.taken))
        tokens = self.model.draft(self.places[-1], self.taken[-1], wanted)
        assert len(tokens) in (0, wanted)
        self.refused += not tokens
        self.drafts.append(tokens)
        return chain(tokens, ["model"] * len(tokens))

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        self.drafted += len(draft)
        self.accepted += len(accepted)
