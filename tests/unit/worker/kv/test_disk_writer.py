"""Checks which resume points reach the disk, and that a restart loses no more than it may."""

from typing import Any

import numpy as np
import pytest

from hearth.worker.disk.file_format import FileKind, FileName, parse
from hearth.worker.kv import disk_tier
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.socketless_worker import Machine
from tests.helpers.by_day import by_day
from tests.helpers.worker.disk_workers import Workers

POINTS = ["qwen3_5", "falcon_h1", "gemma3_text", "gpt_oss"]  # each keeps states or windows
WORTH = {"qwen3_5": 70, "falcon_h1": 36, "gemma3_text": 128, "gpt_oss": 128}  # tokens
CHUNK = 64


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tokens(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(100, 2_000, count).tolist()
    return drawn


def start(workers: Workers, name: str, **rules: Any) -> tuple[Machine, Clock]:
    made, clock = workers.start(name, **rules), Clock()
    made.keeper.disk._clock = clock
    return made, clock


def killed(workers: Workers, name: str, ids: list[int], **rules: Any) -> int:
    """Return how many tokens of a prompt are on disk for the next worker."""
    workers.flush()
    return workers.start(name, **rules).ask(ids, 1).cached


def points(workers: Workers) -> list[FileName]:
    names = (parse(path.name, str(CHUNK)) for path in workers.directory.rglob("*.safetensors"))
    return [name for name in names if name is not None and name.kind is not FileKind.ROWS]


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", by_day(POINTS, ("gpt_oss", "falcon_h1")))
def test_a_kill_loses_no_more_than_a_points_worth_or_a_turn(
    workers: Workers, name: str, is_exact: bool
) -> None:
    made, _ = start(workers, name, is_exact=is_exact)
    ids: list[int] = []
    for turn in range(6):
        ids += tokens(40 + 30 * turn, turn)
        answer = made.ask(ids, 4)
        ids += answer.request.sampled
    turn_tokens = 40 + 30 * 5
    kept = killed(workers, name, ids, is_exact=is_exact)
    assert len(ids) - kept <= max(WORTH[name], turn_tokens) + CHUNK, (kept, len(ids))


@pytest.mark.parametrize("name", by_day(POINTS, ("gpt_oss", "falcon_h1")))
def test_points_take_no_more_than_the_rows_that_they_are_for(workers: Workers, name: str) -> None:
    made, _ = start(workers, name)
    ids: list[int] = []
    for turn in range(12):
        ids += tokens(25, turn)
        ids += made.ask(ids, 4).request.sampled
    workers.flush()
    layers = made.layers
    nbytes = {kind: 0 for kind in FileKind}
    for path in workers.directory.rglob("*.safetensors"):
        name_on_disk = parse(path.name, str(CHUNK))
        assert name_on_disk is not None
        count = name_on_disk.token_count
        size = {FileKind.ROWS: count * layers.row_bytes, FileKind.STATE: layers.state_bytes}
        nbytes[name_on_disk.kind] += size.get(
            name_on_disk.kind, layers.window_bytes(min(count, layers.layout.window))
        )
    assert 0 < nbytes[FileKind.STATE] + nbytes[FileKind.WINDOW] <= nbytes[FileKind.ROWS]


@pytest.mark.parametrize("name", by_day(POINTS, ("gpt_oss", "falcon_h1")))
def test_after_a_shutdown_one_extent_is_read_again_at_most(workers: Workers, name: str) -> None:
    made, _ = start(workers, name)
    first, second = tokens(90, 1), tokens(110, 2)
    for ids in (first, second):
        ids += made.ask(ids, 20).request.sampled
    made.keeper.queue_unwritten()
    for ids in (first, second):
        assert len(ids) - killed(workers, name, [*ids, 7, 8]) <= CHUNK


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_a_conversation_that_is_silent_is_written_once_it_is_worth_it(
    workers: Workers, name: str
) -> None:
    made, clock = start(workers, name)
    ids = tokens(WORTH[name] * 3 // 4)
    made.ask(ids, 4)
    made.keeper.sweep()
    workers.flush()
    assert not points(workers), "it is not silent yet, nor grown"
    clock.now_s += disk_tier.QUIET_S
    made.keeper.sweep()
    workers.flush()
    assert points(workers)
    before = len(points(workers))
    clock.now_s += disk_tier.QUIET_S
    made.keeper.sweep()
    workers.flush()
    assert len(points(workers)) == before
    assert killed(workers, name, ids) >= len(ids) - 1


@pytest.mark.parametrize(
    ("name", "chunks"), [*(("qwen3_5", chunks) for chunks in range(6, 12)), ("gpt_oss", 13)]
)
def test_a_worker_that_is_killed_amid_a_long_prefill_loses_no_more_than_the_bound(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, name: str, chunks: int
) -> None:
    bound = 3 * CHUNK + CHUNK // 2  # amid a chunk, so that a point at the cut behind it is late
    monkeypatch.setattr(disk_tier, "COLD_TOKENS", bound)
    made, _ = start(workers, name)
    ids = tokens(20 * CHUNK)
    answer = made.submit(ids, 4)
    made.run(until=lambda: answer.request.position >= chunks * CHUNK)
    workers.flush()
    kept = workers.start(name).submit(ids, 1).request.kept.tokens
    # The next forward is lost too, and the one that is computed while the point is written.
    assert 0 <= (chunks + 2) * CHUNK - kept <= bound
    assert len({point.end for point in points(workers)}) <= 2, "those of former points have gone"


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_prompt_that_is_read_at_the_end_is_written_from_its_slot(
    workers: Workers, name: str
) -> None:
    """Where memory was short its places to resume at are in the live cache alone."""
    made, _ = start(workers, name)
    ids = tokens(20 * CHUNK)
    answer = made.submit(ids, 4)
    made.run(until=lambda: answer.request.position >= 5 * CHUNK)
    for node in list(made.keeper.store.nodes):
        made.keeper.store.set_snapshot(node, None)
    for extent in list(made.keeper.store.extents):
        made.keeper.store.set_window(extent, None, extent.end.position)
    made.keeper.queue_unwritten()
    assert killed(workers, name, ids) == 5 * CHUNK


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("behind", [40, 100, 120, 200])
def test_a_prompt_that_ends_close_behind_a_point_keeps_the_windows_of_both(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, behind: int, is_killed: bool
) -> None:
    """The windows of the point that was replaced went: all of the prompt was read again."""
    monkeypatch.setattr(disk_tier, "COLD_TOKENS", 8 * CHUNK)
    made, _ = start(workers, "gpt_oss")
    ids = tokens(21 * CHUNK + behind, 1)
    ids += made.ask(ids, 20).request.sampled
    if not is_killed:
        made.keeper.queue_unwritten()
    workers.flush()
    assert len(ids) - killed(workers, "gpt_oss", [*ids, 7, 8]) <= CHUNK


@pytest.mark.parametrize("quiet_s", [0.0, 31.0])
def test_a_short_conversation_is_written_at_the_end_also_if_it_was_quiet(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, quiet_s: float
) -> None:
    """A state is worth 2,300 tokens on a 27B: after 30 s of quiet 504 were not, and forgotten."""
    made, clock = start(workers, "qwen3_5")
    worth_bytes = 2_300 * made.layers.row_bytes
    monkeypatch.setattr(disk_tier.DiskTier, "_point_bytes", lambda *_: worth_bytes)
    ids = tokens(500)
    ids += made.ask(ids, 4).request.sampled
    clock.now_s += quiet_s
    made.keeper.sweep()
    assert not points(workers)
    made.keeper.queue_unwritten()
    assert len(ids) - killed(workers, "qwen3_5", [*ids, 7]) <= disk_tier.SHUTDOWN_TOKENS


def test_nothing_is_copied_for_a_disk_that_takes_nothing(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that did not keep up had all unwritten rows copied again at each cut."""
    copied: list[int] = []
    copy_rows = LayerMap.copy_rows

    def counted(self: LayerMap, cache: Any, first: int, end: int, form: Any) -> Any:
        copied.append(end - first)
        return copy_rows(self, cache, first, end, form)

    monkeypatch.setattr(LayerMap, "copy_rows", counted)
    made, _ = start(workers, "qwen3")
    made.keeper.disk.thread.queue_bytes_max = 1
    ids = tokens(20 * CHUNK + 1)
    made.ask(ids, 2)
    assert not copied
    assert made.keeper.disk.thread.counts["writes_refused_queue"] >= 20
    made.keeper.queue_unwritten()
    assert killed(workers, "qwen3", ids) == 20 * CHUNK, "it is written at the end"


def test_where_prompts_part_is_written_once(workers: Workers) -> None:
    made, _ = start(workers, "qwen3_5")
    trunk = tokens(2 * CHUNK)
    made.ask([*trunk, *tokens(30, 1)], 2)
    workers.flush()
    before = points(workers)
    made.ask([*trunk, *tokens(30, 2)], 2)
    made.ask([*trunk, *tokens(30, 3)], 2)
    workers.flush()
    parted = [name for name in points(workers) if name not in before and name.token_count == CHUNK]
    assert len(parted) == 1
    assert killed(workers, "qwen3_5", [*trunk, *tokens(30, 4)]) == len(trunk)


def test_the_days_reserve_is_for_conversations_ends(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = start(workers, "qwen3_5")
    monkeypatch.setattr(type(workers.file_store), "is_reserved", property(lambda _: True))
    ids = tokens(6 * CHUNK)
    ids += made.ask(ids, 4).request.sampled
    workers.flush()
    assert not points(workers), "a killed worker may lose what a day's writing is spent for"
    made.keeper.queue_unwritten()
    assert killed(workers, "qwen3_5", ids) >= len(ids) - CHUNK
