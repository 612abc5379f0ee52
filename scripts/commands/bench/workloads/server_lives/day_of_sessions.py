"""Plays a day: ten sessions in turns, on a server that has memory for one of them.

`memory_mb` says what the memory of one is: what a live cache takes that holds the longest of the
ten to its last turn, by the model's own layers. Keys and values of each token, a window's where it
has windows and one recurrent state where it has states; not quantised, rounded up to whole MB.
"""

import math
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.server import Memory
from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
from hearth.commands.bench.workloads.ask import ask
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.bench.workloads.server_lives.made_sessions import made_session
from hearth.commands.bench.workloads.sessions import SALT_HEX, salt
from hearth.commands.replay.traces import Captured
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.memory_verdict import unloaded_model, unloaded_probe

NAME: Final = "day"
SESSIONS: Final = 10
TURNS: Final = 3
TEMPLATE_TOKENS: Final = 64  # what a chat template writes beside the words, at most
CHARS_PER_TOKEN: Final = 4  # where the model has no tokenizer file to count with
MB: Final = 1 << 20


def day_sessions(scale: Scale, words_first: str) -> list[list[Captured]]:
    """Return the ten, each with a system prompt of its own."""
    return [
        made_session(NAME, number, scale.day_tokens, TURNS, words_first)
        for number in range(SESSIONS)
    ]


def interleaved(sessions: list[list[Captured]]) -> list[Captured]:
    """Return the first turns of all, then the second ones, then the third ones."""
    return list(chain.from_iterable(zip(*sessions, strict=True)))


async def run(visit: Visit) -> Measured:
    if visit.server.url:
        return Measured({}, errors=("only its owner can give it the memory of one session",))
    if not visit.server.can_be_told(Memory.ONE_SESSION):
        return Measured({}, errors=("it has no option that bounds what it keeps in memory",))
    rows = interleaved(day_sessions(visit.scale, salt(visit, NAME)))
    async with measuring(visit) as taken:
        done = await ask(visit, rows, is_serial=True)
    return measured(done, taken.values())


WORKLOADS: Final = (
    Workload(
        NAME,
        f"{SESSIONS} sessions in turns, {TURNS} turns each, with memory for one of them.",
        Start.KILLED,
        run,
    ),
)


# ---------------------------------------------------------------- the memory of one


@cache
def memory_mb(model_dir: Path, scale: Scale) -> int:
    """Return the memory of one session, in MB of 2**20 bytes; at least 1.

    What an architecture raises that Hearth does not know, this raises.
    """
    tokens = session_tokens(model_dir, scale)
    model = unloaded_model(model_dir, tokens, 0).model
    return max(1, math.ceil(LayerMap(unloaded_probe(model)).slot_bytes(tokens, None) / MB))


def session_tokens(model_dir: Path, scale: Scale) -> int:
    """Return how many tokens the longest of the ten has in its last turn, its answer included."""
    texts = [_text(session[-1]) for session in day_sessions(scale, "0" * SALT_HEX)]
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        return max(map(len, texts)) // CHARS_PER_TOKEN + TEMPLATE_TOKENS
    tokenizer = Tokenizer.from_file(str(file))
    return max(len(tokenizer.encode(text).ids) for text in texts) + TEMPLATE_TOKENS


def _text(row: Captured) -> str:
    return "\n".join(message["content"] for message in row.body["messages"])
