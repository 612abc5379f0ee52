"""Two real workers with directories of their own, on tcp:// with CURVE keys: a session moves."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.shared.kv_move_messages import Found, Holds, KVMove
from scripts.bench.moved_sessions import WAIT_S_MAX, Site, first_turn, next_turn, until
from scripts.fixtures.fixture_cache import fixture_dir


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path, fixture_dir("qwen3", tiny=True))
    yield made
    made.stop()


def test_a_session_goes_on_at_another_machine_and_a_holder_that_dies_costs_a_prefill(
    site: Site,
) -> None:
    async def play() -> None:
        async with site.pool() as pool:
            one, two = pool.links[0], pool.links[1]
            said, first = await site.ask(one, first_turn(1, 300))
            await until(lambda: pool.relay.report()["held"])
            turn = next_turn(first_turn(1, 300), said)
            moved, usage = await site.ask(two, turn)
            assert usage.cached_tokens > first.prompt_tokens - 20 and usage.source == "ssd"
            brought = pool.relay.report()["bytes"]
            assert brought > 50 * usage.cached_tokens
            _, theirs = await site.ask(two, turn, key="theirs")
            assert theirs.cached_tokens == 0 and pool.relay.report()["bytes"] == brought
            cold, uncached = await site.ask(one, turn, use_kv_cache=False)
            assert (moved, uncached.cached_tokens) == (cold, 0)

            told = list[Holds]()

            def dies(worker_id: int, message: KVMove) -> None:
                if isinstance(message, Found):
                    site.processes[0].kill()
                    pool.disconnect(0, "is gone")
                    return
                told.extend([message] if isinstance(message, Holds) else [])
                pool.relay.hear(worker_id, message)

            one.hear_kv = dies
            await site.ask(one, first_turn(7, 300))
            await until(lambda: told)
            _, alone = await site.ask(two, first_turn(7, 300))
            assert site.processes[0].wait(WAIT_S_MAX) and alone.cached_tokens < 50
            assert pool.relay.report()["lost"] >= 1

    asyncio.run(play())
