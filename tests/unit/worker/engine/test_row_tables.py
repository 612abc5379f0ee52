"""Tables that stay in their files give the rows that they give in memory, and take no memory."""

import dataclasses
import json
import mmap
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from hearth.commands.models import list_models
from hearth.commands.models.memory_lines import memory_lines
from hearth.proxy.startup_banner import ready_lines
from hearth.shared.errors import StartError
from hearth.shared.models.local_models import OMLX, FoundModel
from hearth.shared.settings import Settings, load_settings
from hearth.worker.doctor.measure_speed import TABLES, measure_tables
from hearth.worker.engine import model_loader
from hearth.worker.engine.compute_dtype import ComputeDtype, compute_in
from hearth.worker.engine.mlx_memory import weight_bytes
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.engine.row_tables import (
    RowTable,
    TableSizes,
    map_tables,
    row_tables,
    table_sizes,
)
from hearth.worker.engine.system_state import process_bytes
from hearth.worker.memory_verdict import memory_verdict
from tests.helpers.worker.checked_fixture import checked, context_of
from tests.helpers.worker.table_checkpoints import CONFIGS, is_table, write_checkpoint

MB = 1024 * 1024
FILE = "model.safetensors"
PROMPT = [5, 9, 17, 33, 5, 9, 2, 44, 5, 9, 17]  # n-grams that repeat, and the end of a text
KINDS = [(kind, bits) for kind in CONFIGS for bits in (0, 4)]
# text_config of Qwen3.8-Flash-Next, as far as it shapes tables
FLASH_NEXT = dict(hidden_size=2560, ple_layer_ids=[2])
read_rows = RowTable.read


def settings_of(directory: Path, **more: str) -> Settings:
    return load_settings({"MODEL_PATH": str(directory), "MAX_KV_SIZE_GB": "0", **more}, None)


def resident(directory: Path) -> LoadedModel:
    """Return the model with its tables in memory."""
    with mock.patch.object(model_loader, "map_tables", lambda *_: TableSizes()):
        return load_model(settings_of(directory))


def logits(loaded: LoadedModel) -> list[mx.array]:
    """Return the logits of a prefill, and of a token behind it."""
    cache = loaded.model.make_cache()
    found = [loaded.model(mx.array([ids]), cache=cache) for ids in (PROMPT, [9])]
    mx.eval(found)
    return found


def stored(directory: Path) -> dict[str, mx.array]:
    """Return the arrays of a checkpoint's tables."""
    arrays: Any = mx.load(str(directory / "model.safetensors"))
    return {name: arrays[name] for name in sorted(arrays) if is_table(name)}


def bytes_of(directory: Path) -> int:
    return sum(array.nbytes for array in stored(directory).values())


def first_table(loaded: LoadedModel) -> RowTable:
    network = loaded.model if loaded.vision is None else loaded.model.model
    tables = {name: each for name, each in network.named_modules() if isinstance(each, RowTable)}
    return tables[min(tables)]


def no_rows(table: RowTable, rows: Any) -> dict[str, Any]:
    return {name: np.zeros_like(part) for name, part in read_rows(table, rows).items()}


@pytest.mark.parametrize(
    ("kind", "bits", "mode"),
    [
        *((*each, "affine") for each in KINDS),
        ("qwen4_exp", 4, "mxfp4"),
        ("deepseek_v41", 8, "mxfp8"),
    ],
)
def test_a_loaded_model_leaves_its_tables_on_the_disk_and_every_logit_is_the_same(
    kind: str, bits: int, mode: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, kind, bits=bits, mode=mode)
    admitted: list[int] = []
    before = mx.get_active_memory()
    loaded = load_model(settings_of(tmp_path), admit=admitted.append)
    taken = mx.get_active_memory() - before
    (asked,) = admitted
    assert 0 <= asked - (weight_bytes(tmp_path) - bytes_of(tmp_path)) < 64  # a number a table
    assert sum(table.nbytes for table in row_tables(loaded.model)) == bytes_of(tmp_path)
    whole = resident(tmp_path)
    held, all_held = (sum(weight.nbytes for weight in weights_of(each)) for each in (loaded, whole))
    assert held + bytes_of(tmp_path) <= all_held + 64
    assert taken < held + bytes_of(tmp_path) / 2, "a table was read into memory"
    more = loaded.facts.parameter_count - whole.facts.parameter_count
    assert 0 <= more <= len(row_tables(loaded.model))
    assert loaded.facts.tables.endswith("a token") and not whole.facts.tables
    expected = logits(whole)
    for by_row, in_memory in zip(logits(loaded), expected, strict=True):
        assert mx.array_equal(by_row, in_memory)
    with mock.patch.object(RowTable, "read", no_rows):
        assert not mx.array_equal(logits(loaded)[0], expected[0]), "the prompt reads no table"


@pytest.mark.parametrize("bits", [0, 4])
def test_each_row_is_found_in_any_order_and_any_shard(bits: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen4_exp", bits=bits)
    table = first_table(load_model(settings_of(tmp_path)))
    arrays = stored(tmp_path)
    first = [name for name in arrays if ".layers.0." in name and name.endswith("weight")]
    assert len(first) > 1
    parts = [
        mx.concatenate([arrays[name.replace("weight", part)] for name in first])
        for part in ("weight", *(("scales", "biases") if bits else ()))
    ]
    rows = mx.dequantize(*parts, group_size=32, bits=4) if bits else parts[0]
    order = np.random.default_rng(0).permutation(np.tile(np.arange(len(rows)), 2))
    table.like = table.like.astype(mx.bfloat16)
    assert mx.array_equal(
        table(mx.array(order.reshape(2, -1, 4))).reshape(-1, 64), rows[mx.array(order)]
    )
    with pytest.raises(AssertionError):
        table(mx.array([len(rows)]))


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_have_the_dtype_that_they_would_be_cast_to_in_memory(
    kind: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, kind, mx.bfloat16, bits=4)
    loaded = load_model(settings_of(tmp_path, DTYPE="bfloat16"))
    compute_in(ComputeDtype("float16", is_cast=True), getattr(loaded.vision, "model", loaded.model))
    found = first_table(loaded)(mx.arange(7))
    name = next(name for name in stored(tmp_path) if name.endswith("weight"))
    embedding = nn.QuantizedEmbedding(32, 64, group_size=32, bits=4)
    parts = {part: stored(tmp_path)[name.replace("weight", part)] for part in embedding}
    is_fixed = kind == "deepseek_v41"  # its forward asks for bfloat16
    for part in ("scales", "biases"):
        parts[part] = parts[part].astype(mx.bfloat16 if is_fixed else mx.float16)
    embedding.update(parts)
    expected = embedding(mx.arange(7))
    assert found.dtype == expected.dtype and mx.array_equal(found, expected)


def write_header(directory: Path, entries: dict[str, tuple[str, list[int], int]]) -> None:
    """Write weights of no content; an entry is dtype, shape and bytes."""
    header, at = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    octets = json.dumps(header).encode()
    file = directory / "model.safetensors"
    file.write_bytes(len(octets).to_bytes(8, "little") + octets + bytes(at))


def test_tables_that_upstream_makes_anew_while_loading_count_as_memory(tmp_path: Path) -> None:
    ple, engram = "layers.1.ple.ple_embedding.ngram_embedding", "layers.1.engram.embed"
    config = {"model_type": "qwen4_exp", "text_config": FLASH_NEXT}
    floats = {f"{ple}.shard_0.weight": ("F8_E4M3", [10, 160], 1600)}
    write_header(tmp_path, floats | {f"{ple}.weight_scale": ("BF16", [1], 2)})
    assert table_sizes(tmp_path, config) == TableSizes()
    write_header(tmp_path, {f"mtp.{ple}.shard_0.weight": ("BF16", [10, 160], 3200)})
    assert table_sizes(tmp_path, config) == TableSizes()
    scaled = {
        f"{engram}.weight": ("F8_E4M3", [10, 256], 2560),
        f"{engram}.scale": ("U8", [10, 8], 80),
    }
    write_header(tmp_path, scaled)
    engrams = {"model_type": "deepseek_v41", "engram_layer_ids": [1]}
    assert table_sizes(tmp_path, engrams) == TableSizes(2640, 24, 24 * 264)


def test_a_table_of_another_form_than_its_file_stays_in_memory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "longcat_flash_ngram")
    loaded = resident(tmp_path)  # its tables were made float32, the file has bfloat16
    assert table_sizes(tmp_path, loaded.config).nbytes
    assert map_tables(loaded.model, tmp_path, loaded.config) == TableSizes()
    assert row_tables(loaded.model) == []


def test_tables_that_upstream_maps_itself_count_no_more(tmp_path: Path) -> None:
    from mlx_vlm.models.qwen4_exp.ple_storage import prepare_external_ple_model

    (tmp_path / "whole").mkdir()
    whole = write_checkpoint(tmp_path / "whole", "qwen4_exp", bits=4, ple_layer_ids=[1])
    index = {"weight_map": dict.fromkeys(mx.load(str(whole / "model.safetensors")), FILE)}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    prepare_external_ple_model(whole, tmp_path / "prepared")
    admitted: list[int] = []
    by_row, prepared = (
        load_model(settings_of(tmp_path / name), admit=admitted.append)
        for name in ("whole", "prepared")
    )
    assert row_tables(prepared.model) == [] and admitted[1] <= admitted[0]
    assert prepared.facts.tables == by_row.facts.tables != ""


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_a_config_tells_nearly_what_its_files_will(kind: str, bits: int, tmp_path: Path) -> None:
    config = json.loads((write_checkpoint(tmp_path, kind, bits=bits) / "config.json").read_text())
    (tmp_path / "alone").mkdir()
    told, found = table_sizes(tmp_path / "alone", config), table_sizes(tmp_path, config)
    assert found.nbytes == bytes_of(tmp_path)
    assert (told.token_rows, told.token_bytes) == (found.token_rows, found.token_bytes)
    assert found.nbytes * 0.85 < told.nbytes <= found.nbytes  # upstream adds rows up to primes


def test_flash_next_has_the_tables_that_upstream_tells_of(tmp_path: Path) -> None:
    packed = {"group_size": 64, "bits": 4, "mode": "affine"}
    narrow = {"language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shards.0": packed}
    narrow = {name: value | {"group_size": 32} for name, value in narrow.items()}
    config = {"model_type": "qwen4_exp", "text_config": FLASH_NEXT, "quantization": packed | narrow}
    sizes = table_sizes(tmp_path, config)
    assert round(sizes.nbytes / 1024**3) == 30  # "roughly 30 GiB of cold lookup data"
    assert sizes.sentence == "32.0 GB of tables on the SSD, read by row: 1.6 KB a token"
    assert table_sizes(tmp_path, config | {"model_type": "qwen3"}) == TableSizes()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_verdict_has_the_tables_apart_from_the_weights_that_must_fit(
    kind: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, kind, mx.float32)
    files, tables = weight_bytes(tmp_path), bytes_of(tmp_path)
    verdict = memory_verdict(tmp_path, settings_of(tmp_path), files, 0)
    assert (verdict.weight_bytes, verdict.tables.nbytes) == (files - tables, tables)
    assert verdict.room_bytes == verdict.limit - verdict.reserve_bytes - files + tables
    assert f"  not among them      {verdict.tables.sentence}" in memory_lines(verdict)


def test_the_verdict_asks_for_the_very_bytes_that_a_load_asks_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "longcat_flash_ngram", bits=4)
    admitted: list[int] = []
    load_model(settings_of(tmp_path), admit=admitted.append)
    verdict = memory_verdict(tmp_path, settings_of(tmp_path), weight_bytes(tmp_path), 0)
    assert admitted == [verdict.weight_bytes] and verdict.kv_bytes is not None


def test_experts_that_fill_the_memory_as_they_are_used_are_refused(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, "qwen4_exp") / "offload_index.json").write_text("{}")
    with pytest.raises(StartError, match="beyond MEMORY_LIMIT_MB"):
        load_model(settings_of(tmp_path))


def test_people_are_told_what_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, "longcat_flash_ngram", mx.float32)
    settings = settings_of(tmp_path, RUN_DIR=str(tmp_path / "run"))
    loaded = load_model(settings)
    line = f"  tables   {loaded.facts.tables}"
    assert line in ready_lines(settings, loaded.facts)
    assert not any(
        "tables" in line
        for line in ready_lines(settings, dataclasses.replace(loaded.facts, tables=""))
    )
    monkeypatch.setattr(list_models, "load_settings", lambda *_: settings)
    found = [FoundModel("org/with-tables", tmp_path, OMLX)]
    monkeypatch.setattr(list_models, "local_models", lambda: found)
    assert list_models.main([]) == 0
    assert f"\norg/with-tables: {loaded.facts.tables}\n" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="macOS counts no pages of files by itself")
def test_pages_of_mapped_files_are_not_this_processs_memory(tmp_path: Path) -> None:
    (tmp_path / "table").write_bytes(bytes(64 * MB))
    with (tmp_path / "table").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    before = process_bytes()
    touched = sum(mapped[:: mmap.PAGESIZE])
    assert touched == 0 and process_bytes() - before < 16 * MB
    mapped.close()


def test_the_doctor_tells_what_rows_cost_a_token_and_a_prompt(tmp_path: Path) -> None:
    plain = context_of("qwen3")
    assert checked(plain, TABLES)[TABLES].verdict == "left out"
    write_checkpoint(tmp_path, "longcat_flash_ngram")
    context = dataclasses.replace(plain, loaded=load_model(settings_of(tmp_path)))
    context.begin_stage(TABLES)
    with mock.patch.object(RowTable, "read", autospec=True, side_effect=read_rows) as read:
        steps = sum(1 for _ in measure_tables(context))
    counts = [len(call.args[1]) for call in read.call_args_list]
    assert counts[:-3] == [1] * 96 and min(counts[-3:]) > 700  # of 1,000 drawn from 3,073
    result = context.results[TABLES]
    assert (result.verdict, result.figures["rows_per_token"]) == ("ok", 3)
    assert result.reason == context.loaded.facts.tables
    alone, together = result.figures["ms_per_token"], result.figures["s_per_1000_tokens"]
    assert isinstance(alone, float) and isinstance(together, float)
    assert alone > 0 < together and steps == 33
