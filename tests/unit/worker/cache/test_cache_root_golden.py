"""Golden names of prefixes: kept KV is found on disk by them, so that they stay what they are.

They depend on no installed version, on no weights made on this machine and on no path but those
named here. A change of one loses every user's kept KV; one that is meant raises SCHEMA.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import pytest

from hearth.shared.settings import Settings
from hearth.shared.settings_from_env import load_settings
from hearth.shared.wire_messages import ModelFacts
from hearth.worker.cache.block_hash import key_root, pack, prefix_hashes, root_hash
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vlm_loader import VisionModel
from hearth.worker.setup import kv_setup

CHUNK: Final = 256
DEFAULT: Final[Mapping[str, str]] = {}
STAMP_NS: Final = 1_700_000_000_123_456_789  # when the weights were written
VERSIONS: Final = {"mlx": "1.0.0", "mlx-lm": "2.0.0", "mlx-vlm": "3.0.0"}
FACTS: Final = ModelFacts(
    name="golden",
    path="/models/golden",
    architecture="qwen3",
    context_tokens=4_096,
    vocab_size=3_072,
    parameter_count=1_000,
    weight_bytes=4_000,
    cache_layout="4 x KVCache",
    backend="cpu",
)
ROOT: Final = "19d83ba83c0055a93e8f746961cccd9d"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Checkpoint whose files are the same everywhere, under versions that are too."""
    monkeypatch.setattr(kv_setup, "version", VERSIONS.__getitem__)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "qwen3"}\n')
    (tmp_path / "tokenizer.json").write_bytes(b"does not count")
    write_weights(tmp_path, "model-00001-of-00002.safetensors", 1_000)
    write_weights(tmp_path, "model-00002-of-00002.safetensors", 2_000)
    return LoadedModel(
        model=None, tokenizer=None, generation_config={}, config={}, directory=tmp_path, facts=FACTS
    )


def write_weights(directory: Path, name: str, size: int, stamp_ns: int = STAMP_NS) -> None:
    """Weights of `size` zeros, written at `stamp_ns`."""
    (directory / name).write_bytes(bytes(size))
    os.utime(directory / name, ns=(stamp_ns, stamp_ns))


def root(model: LoadedModel, environ: Mapping[str, str] = DEFAULT, chunk: int = CHUNK) -> str:
    """The root of `model` under the settings in `environ`, in hex."""
    return kv_setup.cache_root(model, load_settings(environ, None), chunk).hex()


def test_the_root_under_the_default_settings_is_what_it_was(model: LoadedModel) -> None:
    assert root(model) == ROOT


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KV_BITS": "8"}, "1491fb809aea2774288eb1e6492fa92b"),
        ({"KV_BITS": "4"}, "e88899133303ed950d501b1170e14ca8"),
        ({"QUANTIZED_KV_START": "0"}, "f53abf19850d658bc523069f24dd3b01"),
        ({"KV_BITS": "8", "KV_GROUP_SIZE": "32"}, "2af92365eebc6181309085d15473777f"),
    ],
    ids=lambda value: " ".join(map("-".join, value.items())) if isinstance(value, dict) else "",
)
def test_each_setting_that_decides_what_is_kept_gives_its_own_root(
    model: LoadedModel, environ: dict[str, str], expected: str
) -> None:
    assert root(model, environ) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"CACHE_EXACT": "true"},
        {"MODEL_PATH": "/models/other"},
        {"PROXY_MODEL_ID": "other"},
        {"KV_CACHE_DIR": "/elsewhere"},
        {"PREFILL_CHUNK": "64"},
        {"KV_GROUP_SIZE": "32"},
        {"CACHE_STORE_BITS": "4"},
        {"CACHE_STORE_BITS": "8", "KV_GROUP_SIZE": "32"},
        {"CACHE_STORE_BITS": "3.5", "KV_QUANT_SCHEME": "turboquant"},
        {"CACHE_STORE_QUANT_MIN_TOKENS": "0"},
    ],
    ids=lambda environ: "-".join(environ),
)
def test_no_other_setting_changes_the_root(model: LoadedModel, environ: dict[str, str]) -> None:
    assert root(model, environ) == ROOT


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [(64, "984da602e79f5830097aba232efeb1a0"), (512, "f362d321362183c01656b913b466fdc8")],
)
def test_each_chunk_gives_its_own_root(model: LoadedModel, chunk: int, expected: str) -> None:
    assert root(model, chunk=chunk) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"path": "/models/other"}, "0bf0ccb9a9cad9bb055fc8eb2e8385e4"),
        ({"cache_layout": "2 x ArraysCache, 2 x KVCache"}, "73b4675080a2b4dacf469a03ac6f83c7"),
        ({"backend": "metal"}, "54104a08573810ff49e49a1a77db2cbd"),
        ({"name": "other"}, ROOT),
        ({"context_tokens": 8_192}, ROOT),
        ({"takes_images": True}, ROOT),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_model_is_told_by_its_path_its_layout_and_what_computes(
    model: LoadedModel, changed: dict[str, Any], expected: str
) -> None:
    facts = dataclasses.replace(model.facts, **changed)
    assert root(dataclasses.replace(model, facts=facts)) == expected


def test_a_model_that_takes_images_is_told_by_the_version_of_mlx_vlm_too(
    model: LoadedModel,
) -> None:
    vision = cast(VisionModel, object())  # only whether it is there counts
    assert root(dataclasses.replace(model, vision=vision)) == "ce7ae605e63a5d470e584c8d9b99ccfe"


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("mlx", "2549268af964d627666bdc85f5b0ff1e"),
        ("mlx-lm", "92793b30ca2893797b78fc3d97c9039c"),
        ("mlx-vlm", ROOT),
    ],
)
def test_each_version_gives_its_own_root(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, package: str, expected: str
) -> None:
    monkeypatch.setattr(kv_setup, "version", (VERSIONS | {package: "9.9.9"}).__getitem__)
    assert root(model) == expected


def test_the_weights_are_told_by_the_config_and_by_the_stamp_of_each_file(
    model: LoadedModel,
) -> None:
    first, second = sorted(path.name for path in model.directory.glob("*.safetensors"))
    write_weights(model.directory, second, 2_001)
    assert root(model) == "7a6bd6fed82877ab65e0ff3ee4f6db2a"
    write_weights(model.directory, second, 2_000, STAMP_NS + 1)
    assert root(model) == "331b0f20697350a5b01345137ee7622b"
    (model.directory / second).unlink()
    assert root(model) == "e361962bd514d0611c4658429e3e8eb4"
    (model.directory / first).rename(model.directory / "model.safetensors")
    assert root(model) == "b11c5a49773abbdd16d562087a04cc18"
    (model.directory / "config.json").write_bytes(b"{}\n")
    assert root(model) == "376df518eb7a367dd3f6b648ae98c0ac"


def test_the_default_settings_that_enter_the_root_are_what_they_were() -> None:
    settings: Settings = load_settings({}, None)
    entering = (settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start)
    assert entering == (0, kv_setup.ROOT_GROUP_SIZE, 5_000)
    assert kv_setup.SCHEMA == "1"


def test_the_root_of_texts_is_what_it_was() -> None:
    assert root_hash([]).hex() == "cae66941d9efbd404e4d88758ea67670"
    assert root_hash([""]).hex() == "c804ce198ec337e3dc762bdd1a09aece"
    assert root_hash(["ab", "c"]).hex() == "4826ed043ab3cdec576d8541fa5d5a80"
    assert root_hash(["a", "bc"]).hex() == "f14abc19c330e936bb9c8506d69bac9b"
    assert root_hash(["ä", "日本"]).hex() == "c711dd6570e918f6b253fa5246524853"


def test_each_key_has_the_root_that_it_had() -> None:
    shared = root_hash(["golden"])
    assert key_root(shared, "").hex() == "c019d3673590a2e9d402f96ffdacf326"
    assert key_root(shared, "digest").hex() == "11ab9c6cbf88dccbe6f477de54bf075c"


def test_the_names_of_prefixes_are_what_they_were() -> None:
    names = prefix_hashes(root_hash(["golden"]), pack(range(1_000)), [0, 1, 256, 1_000])
    assert [name.hex() for name in names] == [
        "46cce4298128442a9dcff6abdd971daa",
        "2be57919e06886d9f760c9841198041c",
        "bfd7ca8c98c85496ab0b3b76659d38b0",
        "6552758b139fbea576c9422055784264",
    ]
