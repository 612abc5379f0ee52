"""Hands a request whose prompt is read to the decoder."""

import functools
from collections.abc import Callable

from hearth.worker.engine.decode.decoding_sequence import Sequence
from hearth.worker.engine.decode.sampler import TokenChoice
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.layer_adapters import RewindPoint, can_rewind
from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts
from hearth.worker.schedule.memory_guard import AnyKVManager
from hearth.worker.schedule.request_state import Request


def begin_answer(
    request: Request,
    engine: Engine,
    kv_manager: AnyKVManager,
    choose: Callable[[Request], TokenChoice],
    drafts: AnswerDrafts,
) -> Sequence:
    """Return what the decoder goes on from: the slot's cache, and what is not in it yet.

    The request is drafted for from here on, if it is at all. Inference thread.
    """
    slot = request.slot
    assert slot is not None and request.is_prefilled, request.request_id
    drafter = drafts.begin(request) if can_rewind(slot.cache) else None
    # The model is tried once there is something to verify.
    if drafter is not None and not engine.verifies_drafts:
        drafts.stop()
        drafter = None
    request.drafter = drafter
    hidden, request.hidden = request.hidden, None
    return Sequence(
        key=request.request_id,
        cache=slot.cache,
        tokens=request.ids[: request.position],
        tail=request.ids[request.position :],
        choice=choose(request),
        tokens_max=request.tokens_max,
        before_forward=functools.partial(kv_manager.grow, slot),
        before_join=functools.partial(kv_manager.lend, slot),
        join_bytes=functools.partial(kv_manager.lend_bytes, slot),
        take_back=functools.partial(kv_manager.take_back, slot),
        shift=engine.shift(request.query.images, request.position),
        lineage=request.lineage,
        adapter=engine.adapters.of(request.query.adapter),
        drafter=drafter,
        before_draft=functools.partial(kv_manager.grow_for_draft, slot),
        rewind_point=RewindPoint,
        draft_model=drafter.model if drafter is not None else None,
        hidden=hidden,
    )
