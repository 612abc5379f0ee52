"""Makes a scheduler over an engine that writes scripted letters."""

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hearth.shared.wire_messages import Delta, Finished, Sampling, Up
from hearth.worker.cache.block_hash import PrefixHash, pack, prefix_hashes
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.decode.decoder import DecodingSequence, SampledToken
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.decode.shared_trunk import Trunk
from hearth.worker.engine.lora.lora_adapter import LoraAdapters
from hearth.worker.kv.kv_manager import NullKVManager
from hearth.worker.schedule.request_state import AnswerDeltas, ClientLease, Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_config import GenerationWatchdog, SchedulerConfig
from hearth.worker.stream.output_processor import OutputProcessor

END = 0
CHUNK = 10
ROOT = PrefixHash(b"root")


class Letters:
    """Token n is the n-th letter; stands in for a Vocabulary and its detokenisers."""

    def detokeniser(self) -> "Letters":
        return self

    def add(self, token_id: int) -> str:
        return chr(ord("a") + token_id - 1)

    def token_bytes(self, token_id: int) -> bytes:
        return self.add(token_id).encode()


class ScriptedDecoder:
    """Gives each sequence the tokens of its script, then the end-of-turn token."""

    def __init__(self, scripts: dict[str, list[int]]) -> None:
        self.scripts = scripts
        self.sequences: dict[str, DecodingSequence] = {}
        self.log: list[str] = []
        self.is_mergeable = True
        self.trunks: dict[str, Trunk] = {}
        self.shares_trunks = False

    def add(self, sequence: DecodingSequence) -> None:
        assert sequence.request_id not in self.sequences
        self.sequences[sequence.request_id] = sequence
        self.log.append(f"add {sequence.request_id}")

    def step(self) -> list[SampledToken]:
        self.log.append("step")
        sampled = []
        for key in self.sequences:
            script = self.scripts.setdefault(key, [])
            sampled.append(SampledToken(key, script.pop(0) if script else END, None))
        return sampled

    def remove(self, key: str, said: int | None = None) -> DecodingSequence:
        sequence = self.sequences.pop(key)
        sequence.tokens += sequence.tail
        return sequence


class ScriptedEngine:
    def __init__(self, scripts: dict[str, list[int]]) -> None:
        self.decoder = ScriptedDecoder(scripts)
        self.caches_made = 0
        self.verifies_drafts = True
        self.encoder_s = 0.0  # it is given no images
        self.adapters = LoraAdapters()

    def new_cache(self) -> list[Any]:
        self.caches_made += 1
        return []

    def shift(self, images: Any, position: int) -> int:
        return 0

    def synchronize(self) -> None:
        """Nothing is computed ahead."""

    def prefill(self, cache: list[Any], ids: list[int], images: Any, adapter: str) -> None:
        assert not adapter, "it has none"
        cache += ids
        self.decoder.log.append(f"chunk {len(ids)}")


def request(
    name: str,
    prompt: int = 5,
    tokens_max: int = 100,
    stop: str = "",
    text: str | None = None,
    asker: str = "",
) -> Request:
    """`text` names what the prompt says; requests of one text share their beginning."""
    first = zlib.crc32((text or name).encode()) % 1000 + 1
    ids = list(range(first, first + prompt))
    cuts = [*range(CHUNK, prompt - 1, CHUNK), prompt - 1] if prompt > 1 else []
    tokens = pack(ids)
    return Request(
        lease=ClientLease(name, b"peer"),
        ids=ids,
        query=PrefixQuery(tokens, cuts, prefix_hashes(ROOT, tokens, cuts)),
        sampling=Sampling(),
        tokens_max=tokens_max,
        output=OutputProcessor(Letters(), [stop] if stop else []),
        deltas=AnswerDeltas(name),
        queue_name=asker,
    )


def scheduler(
    slots: int = 4,
    watchdog: GenerationWatchdog | None = None,
    parts: Mapping[str, Any] = MappingProxyType({}),
    **scripts: list[int],
) -> tuple[Scheduler, ScriptedEngine]:
    """`parts` are further fields of the config; no time passes unless `clock` says so."""
    engine = ScriptedEngine(scripts)
    choice = SamplingParams(sampler=lambda x, _: x, processors=(), top_logprobs=None)
    made = Scheduler(
        engine,  # type: ignore[arg-type]
        NullKVManager(engine.new_cache),
        Letters(),  # type: ignore[arg-type]
        frozenset({END}),
        lambda request: choice,
        SchedulerConfig(
            slots,
            lambda tokens: [],
            watchdog=watchdog or GenerationWatchdog(),
            **{"clock": lambda: 0.0, **parts},
        ),
    )
    return made, engine


def run(scheduler: Scheduler) -> list[Up]:
    events: list[Up] = []
    for _ in range(10_000):
        if scheduler.is_idle:
            return events
        events += list(scheduler.step())
    raise AssertionError("the scheduler does not come to an end")


def text_of(events: list[Up], name: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.request_id == name)


def finish_of(events: list[Up], name: str) -> Finished:
    (finished,) = [e for e in events if isinstance(e, Finished) and e.request_id == name]
    return finished
