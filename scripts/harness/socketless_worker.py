"""Runs a worker without sockets, with a real model, scheduler and KV manager, step by step."""

import dataclasses
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import Finished, Sampling, Up, Usage
from hearth.worker.cache.block_hash import PrefixHash, adapter_root, prefix_hashes
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.extent_store import MB, Budget
from hearth.worker.cache.image_keys import ImageRun, keys_of
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.draft.answer_drafter import AnswerSources
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.engine.system_state import PowerSource
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_kinds.kinds import probe_tokens
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.schedule.answer_drafts import AnswerDrafts, DraftPolicy, Reach
from hearth.worker.schedule.request_state import AnswerDeltas, ClientLease, RecallDone, Request
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.setup.rank_setup import SingleRank
from hearth.worker.stream.detokenise import Vocabulary
from hearth.worker.stream.output_processor import OutputProcessor
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.store_builders import ROOT, check_store

CHUNK = 64  # small, so that short prompts have many cuts
OPTIONS: dict[str, Any] = dict(  # of a machine: what is None is made, or as in a worker
    rank=None,
    running_max=None,
    root=ROOT,
    end_ids=frozenset(),
    drafts=None,
    features_mb=64,
    engine=None,
)


@cache
def loaded(
    name: str, dtype: str = "float32", quant: int | None = None, tiny: bool = False
) -> LoadedModel:
    """Return a fixture that computes in what its weights are, and no dense form of them."""
    if "/" in name:
        from scripts.harness.architectures import architecture_dir

        directory = architecture_dir(name)
    else:
        directory = fixture_dir(name, dtype, quant, tiny)
    return load_model(load_settings({"MODEL_PATH": str(directory), "DTYPE": "bfloat16"}, None))


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary(loaded(name).tokenizer)


@cache
def marks(name: str) -> TurnMarks:
    return turn_marks(loaded(name).tokenizer)


@dataclass
class Answer:
    """What came of one request."""

    request: Request
    machine: "Machine"
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)  # of each sampled token (vocabulary,)
    usage: Usage | None = None
    reason: str = ""
    cached: int = field(init=False, repr=False)  # once it is finished
    prefilled: int = field(init=False, repr=False)


def _taken(names: Iterable[str], rules: dict[str, Any]) -> dict[str, Any]:
    """Take out of `rules` what is called so."""
    return {name: rules.pop(name) for name in names if name in rules}


class Machine:
    """One model's scheduler and KV manager. `keeps=False` is the cold cache to compare with."""

    def __init__(
        self,
        model: LoadedModel,
        turn_marks: TurnMarks,
        words: Vocabulary,
        keeps: bool = True,
        budget_mb: float = 512,
        disk_thread: DiskThread | None = None,
        **rules: Any,
    ) -> None:
        """`rules` are OPTIONS, and fields of SchedulerConfig and of KeepRules."""
        rules = {"slots_max": 4, "is_exact": False, "chunk": CHUNK} | rules
        how = SimpleNamespace(**OPTIONS | _taken(OPTIONS, rules))
        rank: SingleRank = how.rank or SingleRank()
        self.loaded = model
        self._root: PrefixHash = how.root
        self._words = words
        self._number = 0
        self.answers: dict[str, Answer] = {}
        self.posted: queue.SimpleQueue[RecallDone] = queue.SimpleQueue()
        # No time passes for the scheduler unless `clock` says so: no forward depends on it.
        told: dict[str, Any] = {"clock": lambda: 0.0, "power": PowerSource(lambda: True)}
        told |= _taken([field.name for field in dataclasses.fields(SchedulerConfig)], rules)
        self._is_held_back = told["relief"].holds_back if "relief" in told else lambda: False
        reach: Reach = "none" if rules["is_exact"] else "all"
        self.drafts: AnswerDrafts = how.drafts or AnswerDrafts(DraftPolicy("lookup", reach, reach))
        self.rule = CutRule(rules["chunk"], turn_marks)
        form, seen = rules.get("running_format"), model.vision
        packed = (form.bits, form.group_size) if form is not None else None
        room = int(how.features_mb * MB)
        vision = ImageEncoder(seen.model, model.model, room) if seen is not None else None
        self.engine: Engine = how.engine or rank.engine(
            model, not rules["is_exact"], vision, packed
        )
        with mx.stream(generation_stream):
            probe = self.engine.probe(probe_tokens(self.engine.new_cache()))
            self.layers = rank.layer_map(probe)
        new_cache, budget = self.engine.new_cache, Budget(int(budget_mb * MB))
        keep_rules = KeepRules(cut_label=self.rule.label, **rules)
        self.keeper: Any = (
            KVManager(how.root, self.layers, new_cache, budget, keep_rules, disk_thread)
            if keeps
            else NullKVManager(new_cache)
        )
        self.scheduler = Scheduler(
            self.engine,
            self.keeper,
            words,
            how.end_ids,
            self.choose,
            SchedulerConfig(
                how.running_max or rules["slots_max"],
                self.rule.natural,
                self.rule.grid,
                **told,
                post=self.posted.put,
                drafts=self.drafts,
            ),
        )

    def new_lease(self) -> ClientLease:
        """Return the lease of another request, whose client never leaves."""
        self._number += 1
        lease = ClientLease(f"r{self._number}", b"peer")
        lease.lease_until = float("inf")
        return lease

    def choose(self, request: Request) -> SamplingParams:
        """Greedy, and remembers the log probabilities of each draw."""
        logits: list[Any] = self.answers[request.request_id].logits

        def sample(logprobs: mx.array, places: Sequence[int]) -> mx.array:
            logits[places[0] :] = [logprobs[row] for row in range(len(places))]
            return mx.argmax(logprobs, axis=-1)

        return SamplingParams(sampler=sample, processors=(), top_logprobs=None)

    def submit(
        self,
        ids: list[int],
        tokens_max: int = 8,
        images: Sequence[ImageRun] = (),
        root: PrefixHash | None = None,
        adapter: str = "",
        conversation: Conversation | None = None,
        prediction: Sequence[int] = (),
        **how: Any,
    ) -> Answer:
        """Hand a prompt in, `how` being further fields; `run` or `step` computes it.

        `root` is what its key's hashes begin with; None = the model's own. Without a `conversation`
        it has a number of its own, as a raw prompt has.
        """
        lease = self.new_lease()
        keys = keys_of(ids, images)
        cuts = self.rule.cuts(keys)
        root = root or self._root
        if adapter:
            root = adapter_root(root, self.engine.adapters.identities[adapter])
        request = Request(
            lease=lease,
            ids=list(ids),
            query=PrefixQuery(
                keys,
                cuts,
                prefix_hashes(root, keys, cuts),
                conversation or Conversation(self._number),
                root=root,
                images=tuple(images),
                system_end=self.rule.system_end(keys),
                adapter=adapter,
            ),
            sampling=how.pop("sampling", Sampling()),
            tokens_max=tokens_max,
            output=OutputProcessor(self._words.detokeniser(), []),
            deltas=AnswerDeltas(lease.request_id),
            draft_sources=AnswerSources(ids, prediction=prediction),
            **how,
        )
        return self.enter(request)

    def enter(self, request: Request) -> Answer:
        answer = self.answers[request.request_id] = Answer(request, self)
        with mx.stream(generation_stream):
            self.scheduler.submit(request)
        return answer

    def step(self) -> list[Up]:
        with mx.stream(generation_stream):
            if self.scheduler.is_blocked and not (self._is_held_back() or self.scheduler.is_idle):
                self.scheduler.take_recalled(self.posted.get(timeout=60))
            events = list(self.scheduler.step())
        for event in events:
            if isinstance(event, Finished):
                answer, usage = self.answers[event.request_id], event.usage
                answer.usage, answer.reason = usage, event.reason
                answer.cached, answer.prefilled = usage.cached_tokens, usage.prefilled_tokens
        return events

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Compute until all is answered, or `until`."""
        while not self.scheduler.is_idle and not until():
            self.step()

    def ask(self, ids: list[int], tokens_max: int = 8, **how: Any) -> Answer:
        answer = self.submit(ids, tokens_max, **how)
        self.run()
        return self.settled(answer)

    def settled(self, answer: Answer) -> Answer:
        """Return the answer with its log probabilities as numpy, of delivered tokens only."""
        raw: list[Any] = answer.logits[: answer.usage.completion_tokens if answer.usage else 0]
        answer.logits = [np.array(row.astype(mx.float32)).reshape(-1) for row in raw]
        answer.tokens = [int(row.argmax()) for row in answer.logits]
        return answer

    def work_ahead(self, chunks: int = 1 << 30) -> None:
        with mx.stream(generation_stream):
            while chunks > 0 and self.scheduler.prefill_idle():
                chunks -= 1

    def check(self) -> None:
        """Assert what holds whenever no request runs."""
        store, slots = self.keeper.store, self.keeper.slots
        check_store(store)
        assert sum(node.pins for node in store.nodes) == sum(slot.is_busy for slot in slots)
        held = {(extent, slot.number) for slot in slots for extent in slot.held_extents}
        assert all((e, number) in held for e in store.extents for number in e.holders)


def machine(
    name: str, dtype: str = "float32", quant: int | None = None, tiny: bool = False, **more: Any
) -> Machine:
    return Machine(loaded(name, dtype, quant, tiny), marks(name), vocabulary(name), **more)
