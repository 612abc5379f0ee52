"""The parts of each layer kind, taken out of a real model's cache and put back, give equal bits."""

import dataclasses
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_vlm.models.cache import PoolingCache
from mlx_vlm.models.minimax_m3_vl.language import MiniMaxM3KVCache
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache
from mlx_vlm.models.z1t.language import Z1TCache

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import FileKind, Record
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.layer_adapters import LayerMap, RewindPoint, can_rewind
from hearth.worker.kv.layer_kinds import kinds
from hearth.worker.kv.layer_kinds.kinds import kind_of, leaves, probe_tokens
from hearth.worker.kv.layer_kinds.row_kinds import RowKind
from hearth.worker.kv.layer_kinds.state_kind import Z1T_ARRAYS
from hearth.worker.kv.quantise_kv import KVRows, LayerStates
from hearth.worker.kv.serialise_kv import arrays_of
from hearth.worker.setup.kv_setup import is_exact
from hearth.worker.setup.rank_setup import SingleRank
from scripts.harness.socketless_worker import loaded

# One architecture of each kind of layer that came after rows, windows and states.
NAMES = (
    "mlx_vlm/qwen4_exp",
    "mlx_vlm/deepseek_v4",
    "mlx_vlm/deepseek_v41",
    "mlx_lm/deepseek_v41",
    "mlx_vlm/glm5_next",
    "mlx_vlm/hy_v4",
    "mlx_vlm/unlimited_ocr",
)
NOT_REWOUND = ("mlx_vlm/deepseek_v41", "mlx_lm/deepseek_v41", "mlx_vlm/unlimited_ocr")
NOT_MERGED = (
    *("QSAKVCache", "MiniMaxM3KVCache", "LayerCache", "DeepseekV41Cache"),
    "RingSlidingKVCache",
)
CHOOSING = (*NOT_MERGED[:4], "HyV4KVCache", "PoolingCache", "OverlappedPoolingCache")
IDS = [7 + (5 + 3 * n) * n % 1997 for n in range(420)]
CUTS = (64, 128, 200, 256, 300, 311, 384)  # at multiples of the rates 2, 4, 16 and 128, and not
# A resume here (pending parts are empty, or not) -> how far a live cache had read another text.
# The next forward reads 30 tokens: it would take up again what is derived of as many.
RESUMED = {128: 256, 300: 84, 311: 30}


class Kept:
    """A model's map, and what was taken at each cut of a prompt."""

    def __init__(self, model: LoadedModel) -> None:
        self.engine = Engine(model, batches=False)
        self.map = LayerMap(self.engine.probe(probe_tokens(self.engine.new_cache())))
        self.states: dict[int, LayerStates] = {}
        self.windows: dict[int, KVRows] = {}
        self.cache = self.read(CUTS[-1], keeps=True)

    def read(self, end: int, *, keeps: bool = False) -> list[Any]:
        """Return a cache that has read the prompt up to `end`, cut by cut."""
        cache, start = self.engine.new_cache(), 0
        for cut in (cut for cut in CUTS if cut <= end):
            self.engine.prefill(cache, IDS[start:cut])
            start = cut
            if keeps:
                self.states[cut] = self.map.take_state(cache)
                if self.map.layout.window:
                    count = min(cut, self.map.layout.window)
                    self.windows[cut] = self.map.copy_window(cache, count)
        return cache

    def put_beside(self, cache: list[Any], position: int) -> None:
        """Put the window and the state at `position` into a cache that has the rows."""
        if self.map.layout.window:
            self.map.put_window(cache, [self.windows[position].layers], position)
        if self.map.layout.has_state:
            self.map.put_state(cache, self.states[position], position)

    def next_logits(self, cache: list[Any], position: int) -> list[np.ndarray]:
        """Return the logits of a forward of the next tokens, then of single tokens."""
        found = []
        for start, end in ((position, position + 30), *((position + n,) * 2 for n in (30, 31))):
            ids = IDS[start : max(end, start + 1)]
            logits = self.engine._model(mx.array([ids]), cache=cache)
            found.append(np.array(logits.astype(mx.float32)))
        return found


@pytest.fixture(scope="module", params=NAMES)
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    yield Kept(loaded(request.param))


def are_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("position", RESUMED)
def test_rows_of_a_longer_run_with_a_snapshot_go_on_as_if_never_taken_out(
    kept: Kept, position: int
) -> None:
    fresh, middle = kept.engine.new_cache(), 130 if position > 130 else 66
    first = kept.map.copy_rows(kept.cache, 0, middle, None)
    longer = kept.map.copy_rows(kept.cache, middle, CUTS[-1], None)
    runs = [first.layers, kept.map.kept_rows(longer, middle, position)]
    kept.map.put_rows(fresh, runs, position, 512)
    kept.put_beside(fresh, position)
    expected = kept.next_logits(kept.read(position), position)
    assert are_equal(kept.next_logits(fresh, position), expected)


@pytest.mark.parametrize("position", RESUMED)
def test_a_live_cache_that_is_rewound_goes_on_as_if_it_had_stopped_there(
    kept: Kept, position: int
) -> None:
    cache = kept.read(position)
    kept.engine.prefill(cache, IDS[: RESUMED[position]])  # other tokens than those that follow
    kept.map.reserve(cache, 500)
    kept.map.trim(cache, position)
    kept.put_beside(cache, position)
    assert kept.map.depth(cache) == position
    expected = kept.next_logits(kept.read(position), position)
    assert are_equal(kept.next_logits(cache, position), expected)


def test_a_snapshot_stays_what_it_was_when_the_cache_goes_on(kept: Kept) -> None:
    if not kept.map.layout.has_state:
        assert kept.states[311].nbytes == 0
        return
    taken = kept.states[311]
    before = [np.array(part) for part in parts(taken)]
    cache = kept.engine.new_cache()
    kept.map.put_rows(cache, [kept.map.rows(kept.cache, 0, 311)], 311, 400)
    kept.put_beside(cache, 311)
    kept.next_logits(cache, 311)
    assert all(np.array_equal(a, np.array(b)) for a, b in zip(before, parts(taken), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_forward_that_is_taken_back_leaves_no_trace(name: str) -> None:
    kept = Kept(loaded(name))
    cache, expected_cache = (kept.read(311) for _ in range(2))
    assert can_rewind(cache) is (name not in NOT_REWOUND)
    if name in NOT_REWOUND:
        return
    for each in (cache, expected_cache):  # a window is written in place from the second on
        kept.engine.prefill(each, IDS[311:312])
        kept.engine.prefill(each, IDS[312:313])
    point = RewindPoint(cache)
    kept.engine.prefill(cache, [11, 13, 17, 19, 23])  # over a row's end at every rate but 128
    if point.keeps_rows:
        point.cut(4)
        point = RewindPoint(cache)
        kept.map.trim(cache, 313)
    else:
        point.back(5)
    expected = kept.next_logits(expected_cache, 313)
    assert are_equal(kept.next_logits(cache, 313), expected)


def test_what_is_kept_comes_back_from_a_file(kept: Kept) -> None:
    start, end = 200, 311
    rows = kept.map.copy_rows(kept.cache, start, end, None)
    back = kept.map.rows_from(record(rows, start, end))
    assert kept.map.are_rows(back, start, end)
    assert not kept.map.are_rows(back, start, end + 128), "128 tokens have a row in each group"
    assert all(
        np.array_equal(np.array(a), np.array(b))
        for a, b in zip(arrays(rows), arrays(back), strict=True)
    )
    if kept.map.layout.has_state:
        for cut, taken in kept.states.items():
            state = kept.map.state_from(record(taken, 0, cut))
            assert kept.map.is_state(state), cut
        assert not kept.map.is_state(LayerStates(state.layers[:-1]))
        early = kept.map.state_from(record(kept.states[64], 0, 64))  # a window is not full yet
        assert kept.map.is_state(early)


def test_the_bytes_of_rows_are_those_that_the_arrays_take(kept: Kept) -> None:
    taken = kept.map.copy_rows(kept.cache, 0, 384, None).nbytes  # a multiple of every rate
    # Of 128 tokens each group has whole rows, as 128 is a multiple of every rate.
    exact = kept.map.copy_rows(kept.cache, 0, 128, None).nbytes / 128
    assert taken == 384 * exact and exact <= kept.map.row_bytes < exact + 1


def test_a_live_cache_takes_at_least_the_bytes_of_what_is_taken_out_of_it(kept: Kept) -> None:
    taken = kept.map.copy_rows(kept.cache, 0, CUTS[-1], None).nbytes
    taken += kept.map.take_state(kept.cache).nbytes
    taken += kept.map.window_bytes(kept.map.layout.window)
    assert kept.map.nbytes(kept.cache) >= taken


def record(taken: KVRows | LayerStates, start: int, end: int) -> Record:
    tokens = np.array(IDS[start:end], np.int32)
    names = [PrefixHash(bytes([number]) * 32) for number in range(3)]
    return Record(*names, start, tokens, True, FileKind.ROWS, arrays_of(taken))


def parts(state: LayerStates) -> list[mx.array]:
    return [part for layer in state.layers for part in layer if part is not None]


def arrays(rows: KVRows) -> list[mx.array]:
    return [array for layer in rows.layers for array in layer.arrays]


# ---------------------------------------------------------------- shapes of whole models


def filled(layers: list[Any], tokens: int, first: int = 0) -> list[Any]:
    """Write numbered rows into plain caches."""
    for layer in layers:
        numbers = mx.arange(first, first + tokens, dtype=mx.float32)
        rows = mx.broadcast_to(numbers[None, None, :, None], (1, 2, tokens, 4))
        layer.update_and_fetch(rows, rows + 0.5)
    mx.eval([layer.state for layer in layers])
    return layers


def test_of_windows_of_several_sizes_the_narrow_ones_are_in_the_snapshot() -> None:
    def new_cache() -> list[Any]:
        return [KVCache(), RotatingKVCache(32), RotatingKVCache(8)]

    layers = LayerMap(filled(new_cache(), 40))
    assert (layers.layout.window, layers.layout.has_state) == (32, True)
    live = filled(new_cache(), 100)
    state, window = layers.take_state(live), layers.copy_window(live, 32)
    filled(live, 7, 100)
    fresh = new_cache()
    layers.put_rows(fresh, [layers.rows(live, 0, 100)], 100, 110)
    layers.put_window(fresh, [window.layers], 100)
    layers.put_state(fresh, state, 100)
    for layer, size in zip(fresh[1:], (32, 8), strict=True):
        assert np.array(layer.keys)[0, 0, :, 0].tolist() == list(range(100 - size, 100))
        assert layer.offset == 100
        expected = filled([RotatingKVCache(size)], 100)[0]
        step = mx.full((1, 2, 1, 4), 100.0)
        found, wanted = (cache.update_and_fetch(step, step)[0] for cache in (layer, expected))
        assert sorted(np.array(found)[0, 0, :, 0]) == sorted(np.array(wanted)[0, 0, -size:, 0])


def test_a_snapshot_with_a_narrow_window_stays_and_takes_the_bytes_that_were_foretold() -> None:
    def new_cache() -> list[Any]:
        return [RotatingKVCache(32), RotatingKVCache(8)]

    layers = LayerMap(filled(new_cache(), 3))
    live, fresh = filled(new_cache(), 100), new_cache()
    state, window = layers.take_state(live), layers.copy_window(live, 32)
    assert state.nbytes == layers.state_bytes
    layers.put_window(fresh, [window.layers], 100)
    layers.put_state(fresh, state, 100)
    filled(fresh, 1, 100)
    assert np.array(state.layers[0][0])[0, 0, :, 0].tolist() == list(range(92, 100))


def test_a_layer_that_no_text_fills_counts_no_tokens() -> None:
    layers = LayerMap([KVCache(), *filled([KVCache()], 3)])
    assert layers.depth([KVCache(), *filled([KVCache()], 9)]) == 9


def test_the_bytes_of_a_live_cache_are_those_of_its_buffers() -> None:
    kept = Kept(loaded("mlx_vlm/deepseek_v41"))
    (layer,) = kept.cache
    buffers = [b for b in (*layer._compress_buffers, *layer._key_buffers) if b is not None]
    assert any(buffer.shape[1] > CUTS[-1] for buffer in buffers), "none has spare rows"
    beside = kept.states[CUTS[-1]].nbytes
    assert kept.map.nbytes(kept.cache) >= beside + sum(buffer.nbytes for buffer in buffers)


def test_a_row_of_several_tokens_costs_each_its_share_rounded_up() -> None:
    pooled = PoolingCache(3)
    pooled.update_and_fetch(mx.zeros((1, 2, 5)))  # 20 bytes for 3 tokens
    assert LayerMap([*filled([KVCache()], 6), pooled]).row_bytes == 2 * 2 * 4 * 4 + 7


def test_what_layers_hand_to_each_other_is_forgotten_with_the_rows() -> None:
    kept = Kept(loaded("mlx_vlm/deepseek_v41"))
    (leaf,) = leaves(kept.cache)
    assert any(getattr(leaf, name) is not None for name in leaf.HANDOFF)
    kept.map.trim(kept.cache, 128)
    assert all(getattr(leaf, name) is None for name in leaf.HANDOFF)


def test_index_keys_of_minimax_m3_are_put_back_beside_the_rows() -> None:
    def read(cache: list[Any], first: int, count: int) -> np.ndarray:
        keys = mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None]
        filled(cache, count, first)
        return np.array(cache[0].update_index_and_fetch(keys))

    live, fresh = [MiniMaxM3KVCache()], [MiniMaxM3KVCache()]
    read(live, 0, 20)
    layers = LayerMap(live)
    layers.put_rows(fresh, [layers.copy_rows(live, 0, 12, None).layers], 12, 30)
    layers.trim(live, 12)
    assert read(fresh, 12, 3).ravel().tolist() == read(live, 12, 3).ravel().tolist() == [*range(15)]


def test_a_z1t_layer_knows_its_depth_again() -> None:
    live, fresh = [Z1TCache()], [Z1TCache()]
    for number, name in enumerate(Z1T_ARRAYS):
        setattr(live[0], name, mx.full((1, 4), number))
    live[0].offset = 9
    layers = LayerMap(live)
    layers.put_state(fresh, layers.take_state(live), 9)
    assert layers.depth(fresh) == 9


def test_a_ring_begins_anew_behind_a_prompt_that_goes_on() -> None:
    def answered(cache: list[Any]) -> np.ndarray:
        for number in range(9, 15):
            filled(cache, 1, number)
        return np.array(cache[0].state[0])

    live = filled([RingSlidingKVCache(4)], 6)
    layers = LayerMap(live)
    for number in range(6, 13):
        filled(live, 1, 100 + number)
    layers.trim(live, 6)
    expected = filled([RingSlidingKVCache(4)], 9)
    assert np.array_equal(answered(filled(live, 3, 6)), answered(expected))


def test_a_layer_that_no_text_fills_costs_a_text_model_nothing() -> None:
    probe = [*filled([KVCache()], 3), KVCache()]
    assert LayerMap(probe).layout.resumes_anywhere
    assert LayerMap(probe).row_bytes == 2 * 2 * 4 * 4


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function by which an installed package adds AddedCache, as `module:attribute`."""

    def add(value: str) -> None:
        point = EntryPoint("AddedCache", value, kinds.ENTRY_POINTS)
        monkeypatch.setattr(kinds, "entry_points", lambda group: [point])
        kinds.added_kinds.cache_clear()

    yield add
    monkeypatch.undo()
    kinds.added_kinds.cache_clear()


class AddedCache(KVCache):
    """A class of another package."""


ADDED_KIND = RowKind()


def test_an_installed_package_adds_a_kind_by_an_entry_point(added: Callable[[str], None]) -> None:
    added(f"{__name__}:ADDED_KIND")
    assert kind_of(AddedCache()) is ADDED_KIND
    assert LayerMap(filled([AddedCache()], 3)).layout.resumes_anywhere
    assert kinds.added_versions("2 x AddedCache") == [f"{__name__}:ADDED_KIND"]
    assert kinds.added_versions("2 x KVCache") == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [("hearth.nothing:KIND", "cannot be loaded"), (f"{__name__}:AddedCache", "no instance")],
)
def test_an_entry_point_that_gives_no_kind_is_named(
    added: Callable[[str], None], value: str, reason: str
) -> None:
    added(value)
    with pytest.raises(StartError, match=f"AddedCache.*{reason}"):
        kind_of(AddedCache())


def with_layers(name: str) -> LoadedModel:
    """Return a model that needs no exact mode and batches, said to have a layer of this class."""
    model = loaded("qwen3", tiny=True)
    facts = dataclasses.replace(model.facts, cache_layout=f"1 x ArraysCache, 2 x {name}")
    return dataclasses.replace(model, facts=facts)


@pytest.mark.parametrize("name", ("KVCache", *NOT_MERGED))
def test_one_kind_that_does_not_merge_forbids_the_batches_of_a_model(name: str) -> None:
    engine = SingleRank().engine(with_layers(name), batches=True)
    assert engine.decoder.is_mergeable is (name == "KVCache")


@pytest.mark.parametrize("name", ("KVCache", *CHOOSING, "RingSlidingKVCache"))
def test_a_choice_is_exact_by_default_and_what_only_a_prefill_writes_always(name: str) -> None:
    default, fast = (load_settings(each, None) for each in ({}, {"CACHE_EXACT": "false"}))
    model = with_layers(name)
    assert is_exact(model, default) is (name != "KVCache")
    assert is_exact(model, fast) is (name == "RingSlidingKVCache")
