"""KV stored in one format is served under every setting: each file says how it is packed."""

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_vlm.turboquant import TurboQuantKVCache

from hearth.shared.settings import load_settings
from hearth.worker.disk.file_format import FileKind, FileName, encode, parse, read
from hearth.worker.engine.engine import Engine
from hearth.worker.kv import quantise_kv
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from hearth.worker.setup.kv_setup import make_kv_manager
from scripts.harness.socketless_worker import Answer, Machine, loaded, machine
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.disk_workers import GB, TEXT, Workers, prompt

Contents = dict[FileName, tuple[str, frozenset[str]]]  # digest of a file, labels of its arrays

CUTS: Final = CutRule(64, TurnMarks(frozenset(), ()))
MIN_TOKENS: Final = 256  # of a prefix that is packed
OFF: Final[dict[str, str]] = {}
EIGHT: Final = {"CACHE_STORE_BITS": "8"}
FOUR: Final = {"CACHE_STORE_BITS": "4", "KV_GROUP_SIZE": "32"}
TURBO: Final = {"CACHE_STORE_BITS": "3.5", "KV_QUANT_SCHEME": "turboquant"}
LABELS: Final = {"off": "", "8": "8x64", "4": "4x32", "turbo": "turboquant3.5-float32-"}
STEPS: Final = [("off", OFF), ("8", EIGHT), ("4", FOUR), ("turbo", TURBO), ("off again", OFF)]


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path / "kv")
    yield made
    made.kill()


@cache
def rules_under(name: str, settings: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return the root and the rules that a worker has under these settings."""
    engine = Engine(loaded(name))
    with mx.stream(generation_stream):
        environ = dict(settings) | {"MAX_KV_SIZE_GB": "0"}
        manager = make_kv_manager(engine, loaded(name), load_settings(environ, None), CUTS)
    assert isinstance(manager, KVManager)
    rules = manager.rules
    stored = {"store_format": rules.store_format, "store_from": rules.store_from}
    return {"root": manager.store.root.name, "is_exact": rules.is_exact, **stored}


def start(workers: Workers, name: str, settings: dict[str, str], **more: Any) -> Machine:
    return workers.start(name, **rules_under(name, tuple(sorted(settings.items()))), **more)


def asked_in(name: str, step: str) -> list[int]:
    """Return a prompt whose first words no other step's has."""
    return prompt(name, f"{step}: where do the boats go? {TEXT}", TEXT)


def files(directory: Path) -> Contents:
    """Return what each file holds, and how its arrays are packed."""
    found: Contents = {}
    for path in directory.rglob("*.safetensors"):
        name, data = parse(path.name, CUTS.label), path.read_bytes()
        assert name is not None
        header = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
        labels = re.findall(r'"[0-9]+\.[0-9]+\.?([^"]*)":', header)
        found[name] = (hashlib.sha256(data).hexdigest(), frozenset(labels))
    return found


def packed_from(answer: Answer) -> int:
    """Return where the first run begins that is long enough to be packed."""
    return max((cut for cut in answer.request.query.cuts if cut < MIN_TOKENS), default=0)


def logits_over(name: str, settings: dict[str, str], ids: list[int], answer: Answer) -> np.ndarray:
    """Return the first logits over KV that was packed and unpacked by upstream's own calls."""
    model, limit, packed = loaded(name).model, answer.cached, packed_from(answer)
    with mx.stream(generation_stream):
        cache = make_prompt_cache(model)
        at = 0
        for cut in [cut for cut in answer.request.query.cuts if cut <= limit]:
            model(mx.array([ids[at:cut]]), cache=cache)
            at = cut
        for layer in cache:
            rows = [array[..., packed:limit, :] for array in (layer.keys, layer.values)]
            for whole, back in zip(
                (layer.keys, layer.values), there_and_back(settings, rows), strict=True
            ):
                whole[..., packed:limit, :] = back
        logits = model(mx.array([ids[limit:]]), cache=cache)[0, -1]
        return np.array(logits - mx.logsumexp(logits))


def there_and_back(settings: dict[str, str], rows: list[mx.array]) -> list[mx.array]:
    if settings is TURBO:
        packer = TurboQuantKVCache(3.5)
        packer.update_and_fetch(*rows)
        return list(packer.dequantize())
    form: Any = {"bits": int(settings["CACHE_STORE_BITS"])}
    form["group_size"] = int(settings.get("KV_GROUP_SIZE", "64"))
    return [mx.dequantize(*mx.quantize(each, **form), **form) for each in rows]


def check_cold_equals_exact(workers: Workers, name: str, copy: Path) -> None:
    """Ask every step's prompt in exact mode over a copy of the directory."""
    shutil.copytree(workers.directory, copy)
    before = files(copy)
    exact = Workers(copy)
    warm = start(exact, name, {"CACHE_EXACT": "true"})
    cold = machine(name, keeps=False, is_exact=True)
    for step, settings in STEPS:
        ids = asked_in(name, step)
        answer, expected = warm.ask(ids), cold.ask(ids)
        assert answer.tokens == expected.tokens
        assert all(map(np.array_equal, answer.logits, expected.logits))
        limit = answer.request.query.limit
        assert answer.cached == (limit if settings is OFF else packed_from(answer)), step
    exact.flush()
    exact.kill()
    after = files(copy)
    assert warm.keeper.disk.counts["recalls_not_exact"] > 0
    for file_name, held in before.items():
        better = FileName(
            *(file_name.kind, file_name.start, file_name.end, file_name.token_count, True),
            CUTS.label,
        )
        assert after.get(better, after.get(file_name)) == held or not file_name.is_canonical


def test_files_of_every_setting_are_served_under_every_other(
    workers: Workers, tmp_path: Path
) -> None:
    """With `-s` it prints what each step served and wrote, and how far answers were from raw KV."""
    name, held = "qwen3", Contents()
    expected: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # over packed rows, over raw ones
    for number, (step, settings) in enumerate(STEPS):
        warm = start(workers, name, settings)
        told = []
        for earlier, packing in STEPS[:number]:
            ids = asked_in(name, earlier)
            answer = warm.ask(ids)
            limit = answer.request.query.limit
            assert answer.usage is not None and answer.usage.source == "ssd"
            assert (answer.cached, answer.prefilled) == (limit, len(ids) - limit), (step, earlier)
            if earlier not in expected:
                raw = machine(name, keeps=False).ask(ids, 1).logits[0]
                packed = raw if packing is OFF else logits_over(name, packing, ids, answer)
                expected[earlier] = packed, raw
            error, loss = (np.abs(answer.logits[0] - each).max() for each in expected[earlier])
            assert (error, loss) == (0, 0) if packing is OFF else 20 * error < loss
            told.append(f"{earlier}: {limit} cached, {len(ids) - limit} read, dlogp {loss:.2g}")
        own = warm.ask(asked_in(name, step))
        assert own.cached == 0
        workers.flush()
        now = files(workers.directory)
        assert {each: now.get(each) for each in held} == held, "lost, or written over"
        new = {each: now[each] for each in now.keys() - held.keys()}
        check_new_files(own, new, step)
        print(f"{step}: {bytes_a_token(workers.directory, own):,.0f} bytes a token;", *told)
        held = now
        warm.check()
    workers.kill()
    check_cold_equals_exact(workers, name, tmp_path / "copy")


def bytes_a_token(directory: Path, answer: Answer) -> float:
    """Return the bytes of a prompt's files for each token behind the minimum, headers included."""
    paths = [(parse(path.name, CUTS.label), path) for path in directory.rglob("*.safetensors")]
    found = {name: path.stat().st_size for name, path in paths if name is not None}
    runs = [name for name in found if name.end in packed_ends(answer)]
    return sum(found[name] for name in runs) / sum(name.token_count for name in runs)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "glm4_moe_lite", "deepseek_v32"])
def test_states_windows_and_latent_rows_come_back_beside_packed_rows(
    workers: Workers, name: str
) -> None:
    ids = prompt(name, TEXT, TEXT)
    first = start(workers, name, TURBO).ask(ids)
    workers.flush()
    later = [each for each in files(workers.directory) if each.end in packed_ends(first)]
    assert later and not any(each.is_canonical for each in later)
    warm = start(workers, name, OFF)
    again = warm.ask(ids)
    assert again.usage is not None and again.usage.source == "ssd"
    assert again.cached == again.request.query.limit
    assert warm.keeper.disk.counts["recalled_packed_tokens"] == again.cached - packed_from(again)
    child = warm.ask(prompt(name, TEXT, TEXT, "And then?"))
    assert child.prefilled > 0 and child.cached >= MIN_TOKENS
    workers.flush()
    ends = packed_ends(child)
    assert not any(each.is_canonical for each in files(workers.directory) if each.end in ends)
    exact = start(workers, name, {"CACHE_EXACT": "true"})
    answer, cold = exact.ask(ids), machine(name, keeps=False, is_exact=True).ask(ids)
    assert answer.cached == packed_from(answer)
    assert all(map(np.array_equal, answer.logits, cold.logits))
    workers.flush()
    better = [each for each in files(workers.directory) if each.end in packed_ends(first)]
    assert len(better) == len(later) and all(each.is_canonical for each in better)


@pytest.mark.parametrize("reason", ["other code", "not installed"])
def test_what_cannot_be_unpacked_here_is_a_counted_miss_and_written_anew(
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
) -> None:
    ids = prompt("qwen3", TEXT, TEXT)
    start(workers, "qwen3", TURBO).ask(ids)
    workers.flush()
    before = files(workers.directory)
    if reason == "other code":  # as another version of mlx-vlm's would unpack otherwise
        monkeypatch.setattr(quantise_kv, "_sample", lambda bits, widths: b"others")
    else:
        monkeypatch.setattr(quantise_kv, "has_vision", lambda: False)
    warm = start(workers, "qwen3", TURBO if reason == "other code" else OFF)
    answer = warm.ask(ids)
    assert answer.cached == packed_from(answer)
    same_tokens(answer, machine("qwen3", keeps=False).ask(ids))
    assert warm.keeper.disk.counts["recalls_unreadable"] == 1
    assert "it cannot be read here" in caplog.text
    workers.flush()
    after = files(workers.directory)
    first = next(end for end in packed_ends(answer))
    (new,) = [name for name in after if name.end == first]
    assert after[new] not in before.values()
    again = start(workers, "qwen3", OFF if reason == "not installed" else TURBO)
    assert again.ask(ids).cached > packed_from(answer)


def test_packed_rows_that_call_themselves_canonical_are_not_served(workers: Workers) -> None:
    ids = prompt("qwen3", TEXT, TEXT)
    first = start(workers, "qwen3", EIGHT)
    root = first.keeper.store.root.name
    first.ask(ids)
    workers.flush()
    workers.kill()
    home = workers.directory / root.hex()
    for name in files(workers.directory):
        if not name.is_canonical:
            path = home / name.file_name
            record = replace(read(path, root, name, GB), is_canonical=True, rule=CUTS.label)
            path.unlink()
            (home / record.name.file_name).write_bytes(b"".join(encode(record)))
    warm = start(workers, "qwen3", {"CACHE_EXACT": "true"})
    answer, cold = warm.ask(ids), machine("qwen3", keeps=False, is_exact=True).ask(ids)
    assert answer.cached == packed_from(answer)
    assert all(map(np.array_equal, answer.logits, cold.logits))
    assert warm.keeper.disk.counts["recalls_unreadable"] == 1


@pytest.mark.parametrize(("settings", "comes_back"), [(FOUR, True), (OFF, False)])
def test_packed_rows_come_back_where_raw_ones_would_have_no_room(
    workers: Workers, settings: dict[str, str], comes_back: bool
) -> None:
    ids = prompt("qwen3", TEXT, TEXT)
    rules = rules_under("qwen3", tuple(sorted(settings.items())))
    workers.start("qwen3", **(rules | {"store_from": 0})).ask(ids)
    workers.flush()
    answer = start(workers, "qwen3", OFF, budget_mb=1).ask(ids)  # raw rows of it are 2 MB
    assert (answer.cached == answer.request.query.limit) is comes_back


def packed_ends(answer: Answer) -> list[bytes]:
    query = answer.request.query
    return [end for cut, end in zip(query.cuts, query.names, strict=True) if cut >= MIN_TOKENS]


def check_new_files(own: Answer, new: Contents, step: str) -> None:
    """Check that what a step wrote of its prompt says how it is packed, and is fast if it is."""
    query = own.request.query
    label = LABELS.get(step, "")
    starts = dict(zip(query.cuts, [0, *query.cuts], strict=False))
    for cut, end in zip(query.cuts, query.names, strict=True):
        (name,) = [each for each in new if each.end == end]
        assert name.kind is FileKind.ROWS and name.token_count == cut - starts[cut]
        (found,) = new[name][1]
        is_packed = bool(label) and cut >= MIN_TOKENS
        assert found.startswith(label if is_packed else "") and bool(found) == is_packed
        assert name.is_canonical is not is_packed
