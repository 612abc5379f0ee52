"""JSON that is kept takes the memory that it is counted with."""

import tracemalloc

import pytest

from hearth.proxy.api.responses.response_store import ResponseStore

OVERHEAD_BYTES = 600  # of an entry: its objects and their place in the table


@pytest.mark.parametrize("length", [1, 1_000, 1_500, 3_000, 20_000])
def test_stored_responses_hold_no_more_memory_than_is_counted(length: int) -> None:
    """The store is bounded by its bytes, so what it does not count is bounded by nothing."""
    store, response = ResponseStore(), {"text": "x" * length}
    store.keep("key", {"input": "Hi"}, {"id": "resp_0", **response})
    tracemalloc.start()
    try:
        for number in range(1, 101):
            store.keep("key", {"input": "Hi"}, {"id": f"resp_{number}", **response})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(store) == 101
    assert held <= store.nbytes + 101 * OVERHEAD_BYTES, held / 101
