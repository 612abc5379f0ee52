"""Measures how fast a model reads and answers here, so that a plan can say how long a run takes."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.bench.rounds.model_facts import BenchModel
from hearth.commands.bench.server import Memory, Server
from hearth.commands.bench.servers.started_server import FOLDER_PREFIX, started
from hearth.commands.replay.player import Target, replay
from hearth.commands.replay.traces import CHAT_PATH, Captured
from hearth.shared.errors import StartError

_SHORT_WORDS: Final = 8  # the first request compiles kernels, which is no reading
_LONG_WORDS: Final = 600
_ANSWER_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one model is on this machine, on the server that was asked."""

    start_s: float
    read_s: float  # of one token of a prompt
    answer_s: float  # of one token of an answer


async def calibrated(server: Server, model: BenchModel) -> Rates:
    """Start `server`, read one short prompt and one of some hundred tokens, and end it.

    Raises:
        ServerStartError: it does not start.
        StartError: it does not answer.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as home:
        async with started(server, model.directory, Path(home), Memory.DEFAULT, 0) as running:
            start_s = time.perf_counter() - began
            await _asked(running.target, _SHORT_WORDS)
            tokens, first_s, total_s = await _asked(running.target, _LONG_WORDS)
    return Rates(start_s, first_s / tokens, (total_s - first_s) / (_ANSWER_TOKENS - 1))


async def _asked(target: Target, words: int) -> tuple[int, float, float]:
    """Return tokens of the prompt, seconds to the first token of the answer and to its end."""
    text = " ".join(f"{number * 7919 % 997} items" for number in range(words // 2))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Sum these up: {text}"}]}
    asked = Captured("calibration", "chat", CHAT_PATH, {}, body, "", 0.0, 0.0)
    aimed = Target(
        target.base_url,
        target.key,
        target.model,
        tokens_max=_ANSWER_TOKENS,
        timeout_s=target.timeout_s,
        extra=target.extra,
    )
    rows, _ = await replay([asked], aimed)
    outcome = rows[0].outcome
    if not outcome.is_answered:
        raise StartError(f"The first question was not answered: {outcome.error}")
    prompt = outcome.tokens.prompt if outcome.tokens else words
    first_s = outcome.ttft_s or outcome.total_s
    return max(1, prompt), first_s, max(first_s, outcome.total_s)
