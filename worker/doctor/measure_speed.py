"""Measures the speed of reading, decoding, tables and KV_CACHE_DIR, and finds the fastest chunk."""

import fcntl
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from hearth.shared.private_files import make_private
from hearth.worker.disk.file_format import TEMP_PREFIX
from hearth.worker.disk.file_store import locked_counters
from hearth.worker.doctor.check_answers import bytes_needed
from hearth.worker.doctor.check_context import (
    DEPTH_MIN,
    CheckContext,
    LeftOut,
    Steps,
    UpstreamSequence,
    make_canary,
    timed,
)
from hearth.worker.doctor.findings import FOLDER, Figure
from hearth.worker.engine.row_tables import row_tables

SPEED, CHUNK, TABLES, SSD = "speed", "chunk", "tables", "SSD"
PROBE_TOKENS: Final = 256
FORWARD_S_MAX: Final = 2.0  # a request, and a Mac's display, may wait for one forward
FORWARD_TOKENS_MAX: Final = 2048
CHUNKS: Final = (256, 512, 1024, 2048)
CHUNK_GAIN_MIN: Final = 0.10  # least gain, as another chunk makes kept canonical KV fast KV
READ_ROUNDS: Final = 3  # rounds over all sizes; the first warms kernels up and is not counted
# How much the checks of the canary read and decode, in lengths of its last prompt and in answers:
# cold, exact, default, forks, drafts. Rows that verify a draft count at their cost on a GPU: four
# rows cost as much as one and a half tokens.
PROMPTS_READ: Final = 9
ANSWERS_DECODED: Final = 30
CANARY_SHARE: Final = 0.6  # share of the time for the canary; batches, chunks and SSD have the rest
ANSWER_TOKENS_MIN: Final = 4
TOKENS_ALONE: Final = 32  # tokens whose rows are read as in decoding, for a median
TOKENS_TOGETHER: Final = 1000  # tokens whose rows are read as in a prefill
PIECE_BYTES: Final = 4 << 20  # a request may wait for one piece
PIECES_MIN: Final = 4
SYNC_EVERY: Final = 8  # pieces per fsync
FREE_SHARE: Final = 0.1  # share of the disk's free bytes that may be written
LOCK_WAIT_S_MAX: Final = 0.5
DAY_S: Final = 86_400
F_NOCACHE: Final = 48  # macOS: reads bypass the system's cache


def measure_speed(context: CheckContext) -> Steps:
    """Measure reading and decoding, and make the canary as long as time and memory allow."""
    tokens = min(context.rule.chunk, PROBE_TOKENS)
    ids = _ids(context, 2 * tokens)
    sequence = UpstreamSequence(context.model)
    _, read_s = yield from timed(sequence.read(ids, [tokens, 2 * tokens]))
    context.prefill_tokens_per_s = tokens / read_s
    context.decode_s = min((yield from timed(sequence.answer(ids[:1], 4))))
    depth, answer_tokens, reason = _canary_size(context)
    context.canary = make_canary(context.loaded.tokenizer, context.rule.marks, depth, answer_tokens)
    context.report(
        "ok",
        {
            "prefill_tokens_per_s": context.prefill_tokens_per_s,
            "decode_tokens_per_s": 1 / max(context.decode_s, 1e-9),
            "canary_depth": context.canary.depth,
            "canary_answer_tokens": answer_tokens,
        },
        reason,
    )


def _canary_size(context: CheckContext) -> tuple[int, int, str]:
    """Return the canary's depth, its answers' length, and why it is shorter than it could be."""
    answer_tokens, wanted = context.rules.answer_tokens, context.rules.depth_max
    seconds = context.left_s * CANARY_SHARE
    while (
        answer_tokens > ANSWER_TOKENS_MIN
        and ANSWERS_DECODED * answer_tokens * context.decode_s > seconds / 2
    ):
        answer_tokens //= 2
    seconds -= ANSWERS_DECODED * answer_tokens * context.decode_s
    affordable = int(seconds * context.prefill_tokens_per_s / PROMPTS_READ)
    depth = max(min(DEPTH_MIN, wanted), min(wanted, affordable))
    reason = "" if depth == wanted else f"{depth} tokens deep, not {wanted}: time"
    try:
        layers = context.layers()
    except LeftOut:
        return depth, answer_tokens, reason
    while depth > DEPTH_MIN and bytes_needed(layers, depth, context.rule.chunk) > context.room():
        depth = max(DEPTH_MIN, depth // 2)
        reason = f"{depth} tokens deep, not {wanted}: memory"
    return depth, answer_tokens, reason


def measure_chunk(context: CheckContext) -> Steps:
    """Read the same tokens in chunks of several sizes, as far as time and memory allow."""
    default, rate = context.rules.default_chunk, context.prefill_tokens_per_s
    sizes = sorted({*CHUNKS, default})
    affordable = int(context.left_s * CANARY_SHARE * rate / (READ_ROUNDS * len(sizes)))
    tokens = min(max(CHUNKS), affordable)
    # A request, or a Mac's display, may have to wait for one forward. The limit is half of what the
    # rate allows, because the rate was measured with a short context.
    by_rate = min(FORWARD_TOKENS_MAX, int(rate * FORWARD_S_MAX / 2))
    largest = min(tokens, max(context.rule.chunk, by_rate, default))
    sizes = [size for size in sizes if size <= largest]
    if default not in sizes or len(sizes) < 2:
        raise LeftOut(f"{tokens} tokens can be read in the time that is left")
    context.require_bytes(context.layers().slot_bytes(tokens, None), f"the KV of {tokens} tokens")
    ids = _ids(context, tokens)
    rounds: list[dict[int, float]] = []
    for _ in range(READ_ROUNDS):
        rounds.append({})
        for size in sizes:
            rounds[-1][size] = yield from _tokens_per_s(context, ids, size)
    best = best_chunk(rounds[1:], default)
    figures: dict[str, Figure] = {
        f"tokens_per_s_{size}": max(rates[size] for rates in rounds[1:]) for size in sizes
    }
    figures |= {"tokens": tokens, "default": default, "best": best or default}
    left_out = [size for size in CHUNKS if size not in sizes]
    reason = f"no time for {', '.join(map(str, left_out))}" if left_out else ""
    context.report("ok", figures, reason)


def best_chunk(rounds: Sequence[Mapping[int, float]], default: int) -> int | None:
    """Return the fastest chunk that beat the default by CHUNK_GAIN_MIN in every round.

    Return None if no chunk did. All rounds count, because other work on the machine may make a
    chunk look faster in a single round.
    """
    gains = {size: min(rates[size] / rates[default] for rates in rounds) - 1 for size in rounds[0]}
    best = max(gains, key=lambda size: gains[size])
    return best if gains[best] >= CHUNK_GAIN_MIN else None


def _tokens_per_s(context: CheckContext, ids: list[int], size: int) -> Generator[None, None, float]:
    cache, seconds = context.engine.new_cache(), 0.0
    for start in range(0, len(ids), size):
        began = time.perf_counter()
        context.engine.prefill(cache, ids[start : start + size])
        seconds += time.perf_counter() - began
        yield
    return len(ids) / seconds


def _ids(context: CheckContext, count: int) -> list[int]:
    """Return tokens of the canary's text."""
    canary = make_canary(context.loaded.tokenizer, context.rule.marks, 2 * count, 0)
    return [token for turn in canary.turns for token in turn][:count]


# ---------------------------------------------------------------- the disk


def measure_tables(context: CheckContext) -> Steps:
    """Read rows of the model's tables that nobody has read, as decoding and a prefill would.

    Text repeats its n-grams, so that most rows of a session come from the system's cache.
    """
    tables, drawn = row_tables(context.model), np.random.default_rng()
    if not tables:
        raise LeftOut("all weights of this model are in memory")
    times: list[float] = []
    for tokens in (*[1] * TOKENS_ALONE, TOKENS_TOGETHER):
        rows = [drawn.integers(0, table.row_count, tokens * table.token_rows) for table in tables]
        began = time.perf_counter()
        for table, wanted in zip(tables, rows, strict=True):
            table.read(np.unique(wanted))
        times.append(time.perf_counter() - began)
        yield
    *alone, together = times
    figures: dict[str, Figure] = {
        "rows_per_token": sum(table.token_rows for table in tables),
        "ms_per_token": 1e3 * statistics.median(alone),
        f"s_per_{TOKENS_TOGETHER}_tokens": together,
    }
    context.report("ok", figures, context.loaded.facts.tables)


def measure_ssd(context: CheckContext) -> Steps:
    """Write a file beside the cache, read it back without the system's cache, remove it."""
    directory = context.rules.ssd_directory
    if directory is None:
        raise LeftOut("nothing is written here (MAX_KV_SIZE_GB=0)")
    try:
        yield from _measure(context, directory)
    except OSError as error:
        raise LeftOut(f"the disk refuses: {error.strerror or type(error).__name__}") from error


def _measure(context: CheckContext, directory: Path) -> Steps:
    make_private(directory / FOLDER)
    pieces, seed = _charged(context, directory), os.urandom(16)
    write_s = read_s = 1e-9
    changed = 0
    with tempfile.TemporaryFile(prefix=TEMP_PREFIX, dir=directory / FOLDER) as file:
        for number in range(pieces):
            piece = _piece(seed, number)
            began = time.perf_counter()
            file.write(piece)
            file.flush()
            if (number + 1) % SYNC_EVERY == 0 or number + 1 == pieces:
                os.fsync(file.fileno())
            write_s += time.perf_counter() - began
            yield
        if sys.platform == "darwin":
            fcntl.fcntl(file.fileno(), F_NOCACHE, 1)
        else:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        for number in range(pieces):
            began = time.perf_counter()
            piece = file.read(PIECE_BYTES)
            read_s += time.perf_counter() - began
            changed += piece != _piece(seed, number)
            yield
    mb = pieces * PIECE_BYTES / 1e6
    context.report(
        "fault" if changed else "ok",
        {"mb": mb, "write_mb_per_s": mb / write_s, "read_mb_per_s": mb / read_s},
        "what was read is not what was written" if changed else "",
    )


def _piece(seed: bytes, number: int) -> bytes:
    """Return random bytes, which no SSD can compress."""
    return random.Random(seed + number.to_bytes(4)).randbytes(PIECE_BYTES)


def _charged(context: CheckContext, directory: Path) -> int:
    """Return how many pieces to write, and add them to the day's writes. Raises: LeftOut."""
    stat = os.statvfs(directory)
    free = int(stat.f_bavail * stat.f_frsize * FREE_SHARE)
    pieces = min(context.rules.ssd_bytes, free) // PIECE_BYTES
    per_day = context.rules.ssd_bytes_per_day
    with locked_counters(directory, LOCK_WAIT_S_MAX) as counters:
        counters.start_day(int(time.time() // DAY_S))
        if per_day:
            pieces = min(pieces, (per_day - counters.bytes_written) // PIECE_BYTES)
        if pieces < PIECES_MIN:
            raise LeftOut("the disk is nearly full, or the day's writes are spent")
        counters.bytes_written += pieces * PIECE_BYTES
        counters.save()
    return pieces
