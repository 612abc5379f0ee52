"""Writes what a model takes of this machine's memory as lines for people."""

from collections.abc import Iterator
from typing import Final

from hearth.commands.terminal_text import plain
from hearth.proxy.request.encoder_names import SETTINGS, EncoderKind
from hearth.worker.memory_verdict import LONG_TOKENS, SHORT_TOKENS, MemoryVerdict

GB: Final = 1024**3


def memory_lines(verdict: MemoryVerdict) -> list[str]:
    """Return the verdict, then the sums that it comes from."""
    return [sentence(verdict), *(f"  {line}" for line in _sums(verdict))]


def encoder_sentence(kind: EncoderKind, source: str, nbytes: int) -> str:
    """Return in one sentence what a model is for that answers with no text.

    `nbytes` is what its process takes at most.
    """
    what = {"embeddings": "embeds texts", "rerank": "ranks documents"}[kind]
    return (
        f"It {what} and writes none: set {SETTINGS[kind]}={plain(source)}. Its process takes "
        f"{nbytes / GB:.1f} GB at most, which the model of MODEL_PATH has less."
    )


def sentence(verdict: MemoryVerdict) -> str:
    """Return in one sentence whether the model fits, and with which context."""
    weights, limit = verdict.weight_bytes / GB, verdict.limit / GB
    if verdict.refused:
        return f"It is not served: {plain(verdict.refused)}."
    if not verdict.fits:
        wanted = "a context of 256 tokens beside its weights" if verdict.room_bytes > 0 else ""
        what = wanted or f"its weights ({weights:.1f} GB)"
        return (
            f"It does not fit: this machine gives a worker {limit:.1f} GB, which have no room for "
            f"{what}. Use a smaller model or one of fewer bits, or raise MEMORY_LIMIT_MB."
        )
    if verdict.unknown:
        return (
            f"Its weights fit ({weights:.1f} of {limit:.1f} GB). What its context takes is not "
            f"known before it is loaded: {plain(verdict.unknown[:200])}"
        )
    tokens = verdict.context_tokens
    if verdict.context_by == "memory":
        return f"It fits with a context of {tokens:,} tokens, of {verdict.model_tokens:,}."
    why = " that MAX_KV_SIZE allows" if verdict.context_by == "setting" else ", all of it"
    return f"It fits with a context of {tokens:,} tokens{why}."


def _sums(verdict: MemoryVerdict) -> Iterator[str]:
    yield f"this machine        {verdict.machine_bytes / GB:8.2f} GB of 2**30 bytes"
    if verdict.encoders_bytes:
        yield f"embeds and ranks    {verdict.encoders_bytes / GB:8.2f} at most"
    yield f"a worker may take   {verdict.limit / GB:8.2f}"
    part = f" (of one of {verdict.ranks} ranks)" if verdict.ranks > 1 else ""
    how = f", {verdict.computed_in}" if "made from" in verdict.computed_in else ""
    yield f"weights             {verdict.weight_bytes / GB:8.2f}{part}{how}"
    if verdict.tables.nbytes:
        yield f"not among them      {verdict.tables.sentence}"
    yield f"reserve             {verdict.reserve_bytes / GB:8.2f}"
    yield f"process beside them {verdict.beside_bytes / GB:8.2f} (assumed)"
    if verdict.kv_bytes is None or verdict.forward_bytes is None:
        return
    for tokens in (SHORT_TOKENS, LONG_TOKENS):
        if tokens <= verdict.model_tokens:
            kv, forward = verdict.kv_bytes(tokens), verdict.forward_bytes(tokens)
            fits = "fits" if kv + forward <= verdict.room_bytes else "does not fit"
            yield f"KV at {tokens:>7,}       {kv / GB:8.2f} + {forward / GB:.2f} to read it; {fits}"
