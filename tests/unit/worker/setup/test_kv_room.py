"""Memory is divided between kept KV and requests, and how many compute at once is bounded."""

from hypothesis import example, given, strategies as st

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.memory_reserve import GB, working_bytes
from hearth.worker.setup.kv_setup import live_slots_max, running_max
from hearth.worker.setup.memory_setup import divide_room

BYTES = st.integers(0, 600 * GB)


@given(BYTES, BYTES, BYTES, BYTES, st.floats(0, 0.15))
@example(100 * GB, 20 * GB, 20 * GB, 10 * GB, 0.1)
def test_the_parts_fit_and_a_sequence_of_the_told_context_fits_beside_them(
    limit: int, model: int, slot: int, forward: int, overhead: float
) -> None:
    room = divide_room(limit, model, slot, forward, overhead)
    free = max(0, limit - model - working_bytes(limit)) / (1 + overhead)
    assert 0.499 * free - 2 <= room.kept_bytes <= 0.751 * free + 2
    assert 0 <= room.idle_bytes <= (free - room.kept_bytes) / 2 + 2
    need = slot + forward / (1 + overhead)
    if need <= free / 2:
        assert room.kept_bytes + need <= free + 2


@given(BYTES, BYTES, BYTES, st.integers(0, 20 * GB))
def test_a_larger_machine_keeps_no_less(limit: int, more: int, slot: int, model: int) -> None:
    small, large = (divide_room(size, model, slot, GB) for size in (limit, limit + more))
    assert small.kept_bytes <= large.kept_bytes + 4 and small.idle_bytes <= large.idle_bytes + 4


def counts(is_batched: bool = True, **environ: str) -> tuple[int, int]:
    settings = load_settings(environ, None)
    return running_max(settings, is_batched), live_slots_max(settings)


def test_how_many_compute_and_how_many_are_held_are_two_numbers() -> None:
    assert counts() == (32, 32)
    assert counts(is_batched=False) == (4, 32)
    assert counts(MAX_CONCURRENT_REQUESTS="2") == (2, 32)
    assert counts(MAX_CONCURRENT_REQUESTS="64") == (64, 64)
    assert counts(MAX_CONCURRENT_REQUESTS="8", is_batched=False) == (8, 32)


def test_no_more_compute_than_may_be_held() -> None:
    assert counts(LIVE_SLOTS_MAX="4") == (4, 4)
    assert counts(LIVE_SLOTS_MAX="8", MAX_CONCURRENT_REQUESTS="32") == (8, 8)
    assert counts(LIVE_SLOTS_MAX="64") == (32, 64)
