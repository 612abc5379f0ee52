"""Decodes one token at a time for every running sequence, alone in its own cache or batched.

A lone sequence decodes in the cache that it was prefilled in, without a copy. Two or more of
similar length share a BatchGenerator, which copies their caches when they join; they stay there
until they end. Models whose caches cannot be merged take turns alone.
Owner: the inference thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import TokenBuffer

import hearth.worker.engine.mlx_lm_wired_limit  # noqa: F401  a batch wires nothing
from hearth.worker.engine.sampler import TokenChoice

UNBOUNDED = 1 << 30  # the scheduler, not the batch, counts tokens
ROWS_MAX = 64  # as many as MAX_CONCURRENT_REQUESTS may be
CLEAR_EVERY_TOKENS = 256  # MLX's buffer cache is emptied this often, as mlx-lm does


def _nothing(*_: object) -> None:
    pass


@dataclass(slots=True)
class Sequence:
    """A prefilled request. `cache` holds `tokens`; `tail` is the prompt's rest, not fed yet."""

    key: str
    cache: list[Any]
    tokens: list[int]
    tail: list[int]
    choice: TokenChoice
    tokens_max: int  # of the completion
    before_forward: Callable[[int], None] = _nothing  # called with how many tokens it will hold
    before_join: Callable[[], None] = _nothing  # its cache is about to be copied into a batch
    shift: int = 0  # of positions, by the prompt's images: see ImageEncoder.shift


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """What a sequence leaves: `cache` holds exactly `tokens`, evaluated.

    The tokens may be one more than were returned: decoding looks one ahead.
    """

    cache: list[Any]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token; `logprobs` (vocabulary,) only where the request asked for them."""

    key: str
    token_id: int
    logprobs: mx.array | None


class Decoder:
    """All sequences that decode now, each alone or in one batch.

    Invariant: `step` returns at most one token for each. Owner: the inference thread.
    """

    def __init__(self, model: Any, stream: Any, is_mergeable: bool) -> None:
        self._model = model
        self._stream = stream
        self.is_mergeable = is_mergeable
        self._lone: dict[str, _LoneSequence] = {}
        self._batches: list[_Batch] = []
        self._steps = 0

    def __len__(self) -> int:
        return len(self._lone) + sum(len(batch) for batch in self._batches)

    @property
    def batch_keys(self) -> list[set[str]]:
        """The keys of the sequences that share each batch."""
        return [batch.keys for batch in self._batches]

    @property
    def batch_bytes(self) -> int:
        """The bytes of KV that batches hold: lone sequences' caches are their slots'."""
        return sum(batch.nbytes for batch in self._batches)

    def add(self, sequence: Sequence) -> None:
        """Feed the prompt's tail; the first answer token comes with a later `step`."""
        assert sequence.tail, "the last token's logits are not known without a forward"
        assert sequence.key not in self._lone, sequence.key
        with mx.stream(self._stream):
            self._lone[sequence.key] = _LoneSequence(self._model, sequence)

    def step(self) -> list[SampledToken]:
        """Return the next token of each sequence (none for one that has just joined a batch)."""
        self._steps += 1
        with mx.stream(self._stream):
            sampled = [one for batch in self._batches for one in batch.step()]
            joining = self._joining()
            for key, lone in list(self._lone.items()):
                sampled.append(lone.step(looks_ahead=key not in joining))
            for key in joining:
                self._join(self._lone.pop(key))
        if self._steps % CLEAR_EVERY_TOKENS == 0:
            mx.clear_cache()
        return sampled

    def remove(self, key: str) -> UnfinishedBatch | None:
        """Forget a sequence that ended or was cancelled; return what it leaves, None if unknown."""
        lone = self._lone.pop(key, None)
        with mx.stream(self._stream):
            if lone is not None:
                unfinished: UnfinishedBatch | None = UnfinishedBatch(lone.sequence.cache, lone.fed)
            else:
                unfinished = next(
                    filter(None, (batch.remove(key) for batch in self._batches)), None
                )
                for empty in [batch for batch in self._batches if not len(batch)]:
                    empty.close()
                    self._batches.remove(empty)
            if unfinished is not None:
                mx.eval([layer.state for layer in unfinished.cache])
        return unfinished

    def _joining(self) -> set[str]:
        """Return the lone sequences that have company of their length."""
        if not self.is_mergeable:
            return set()
        classes: dict[int, list[str]] = {}
        for key, lone in self._lone.items():
            if lone.remaining > 1:
                classes.setdefault(_length_class(len(lone.fed)), []).append(key)
        batched = {_length_class(batch.length) for batch in self._batches}
        together = [keys for c, keys in classes.items() if len(keys) > 1 or c in batched]
        return {key for keys in together for key in keys}

    def _join(self, lone: "_LoneSequence") -> None:
        wanted = _length_class(len(lone.fed))
        for batch in self._batches:
            if _length_class(batch.length) == wanted:
                break
        else:
            batch = _Batch(self._model, self._stream)
            self._batches.append(batch)
        lone.sequence.before_join()
        batch.add(lone)
        assert 0 < len(batch) <= ROWS_MAX, (len(batch), ROWS_MAX)


def _length_class(tokens: int) -> int:
    """Return what sequences must share to join: a batch pads every row to its longest.

    Within a class that is at most fourfold.
    """
    return tokens.bit_length() // 2


class _LoneSequence:
    """One sequence in its own cache, one forward ahead of what was returned.

    Invariant: the cache holds `fed`; `_pending` was sampled behind it.
    """

    def __init__(self, model: Any, sequence: Sequence) -> None:
        self.sequence = sequence
        self.remaining = sequence.tokens_max
        self.fed = list(sequence.tokens)  # what the cache holds
        self._model = model
        # Models of text alone take no such argument.
        self._model_arguments = {"shift": sequence.shift} if sequence.shift else {}
        self._context = TokenBuffer(sequence.tokens) if sequence.choice.processors else None
        self._pending = self._forward(mx.array(sequence.tail, dtype=mx.uint32))
        self.fed += sequence.tail

    def step(self, looks_ahead: bool) -> SampledToken:
        """Return the pending token. Looking ahead computes the next one meanwhile."""
        assert self.remaining > 0, "a sequence past its limit is removed, not stepped"
        token, logprobs = self._pending
        self.remaining -= 1
        looks_ahead = looks_ahead and self.remaining > 0
        if looks_ahead:
            self._pending = self._forward(token)
        token_id: int = token.item()  # type: ignore[assignment]
        if looks_ahead:
            self.fed.append(token_id)
        self.last_token_id = token_id
        wanted = self.sequence.choice.top_logprobs is not None
        return SampledToken(self.sequence.key, token_id, logprobs[0] if wanted else None)

    def _forward(self, inputs: mx.array) -> tuple[mx.array, mx.array]:
        """Feed `inputs` (n,); return the next token (1,) and log probabilities (1, vocabulary)."""
        self.sequence.before_forward(len(self.fed) + len(inputs))
        logits = self._model(inputs[None], cache=self.sequence.cache, **self._model_arguments)[
            :, -1, :
        ]
        if self._context is not None:
            context = self._context.update_and_fetch(inputs)
            for process in self.sequence.choice.processors:
                logits = process(context, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self.sequence.choice.sampler(logprobs)
        mx.async_eval(token, logprobs)  # type: ignore[no-untyped-call]
        return token, logprobs


class _Batch:
    """Sequences of similar length in one BatchGenerator, at most ROWS_MAX."""

    def __init__(self, model: Any, stream: Any) -> None:
        self._generator = BatchGenerator(
            model, max_tokens=UNBOUNDED, completion_batch_size=ROWS_MAX, stream=stream
        )
        self._by_uid: dict[int, Sequence] = {}
        self._lengths: dict[int, int] = {}  # uid -> tokens in its row

    def __len__(self) -> int:
        return len(self._by_uid)

    @property
    def length(self) -> int:
        """Tokens of the longest row, which all are padded to."""
        return max(self._lengths.values())

    @property
    def nbytes(self) -> int:
        return int(self._generator.prompt_cache_nbytes)

    @property
    def keys(self) -> set[str]:
        return {sequence.key for sequence in self._by_uid.values()}

    def add(self, lone: _LoneSequence) -> None:
        """Take over a sequence whose newest token was returned but not fed."""
        sequence = lone.sequence
        (uid,) = self._generator.insert(
            [[lone.last_token_id]],
            max_tokens=[UNBOUNDED],
            caches=[sequence.cache],
            all_tokens=[lone.fed],
            samplers=[sequence.choice.sampler],
            logits_processors=[list(sequence.choice.processors)],
        )
        self._by_uid[uid] = sequence
        self._lengths[uid] = len(lone.fed) + 1

    def step(self) -> list[SampledToken]:
        sampled = []
        for response in self._generator.next()[1]:
            sequence = self._by_uid[response.uid]
            self._lengths[response.uid] += 1
            wanted = sequence.choice.top_logprobs is not None
            logprobs = response.logprobs if wanted else None
            sampled.append(SampledToken(sequence.key, int(response.token), logprobs))
        assert len(sampled) <= len(self), (len(sampled), len(self))
        return sampled

    def remove(self, key: str) -> UnfinishedBatch | None:
        uids = [uid for uid, sequence in self._by_uid.items() if sequence.key == key]
        if not uids:
            return None
        (uid,) = uids
        cache, tokens = self._generator.remove(uids, return_prompt_caches=True)[uid]
        del self._by_uid[uid], self._lengths[uid]
        return UnfinishedBatch(cache, list(tokens))

    def close(self) -> None:
        self._generator.close()
