"""Golden names of prefixes: kept KV is found on disk by them, so that they stay what they are.

They depend on no installed version, on no weights made on this machine and on no path but those
named here. A change of one loses every user's kept KV; one that is meant raises SCHEMA.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import ModelFacts
from hearth.worker.cache.block_hash import key_root, pack, prefix_hashes, root_hash
from hearth.worker.engine.compute_dtype import ComputeDtype
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.setup import kv_setup

DEFAULT: Final[Mapping[str, str]] = {}
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
ROOT: Final = "037207f8685a9110fe6950f1fdb2b4fb"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Checkpoint whose files are the same everywhere, under versions that are too."""
    monkeypatch.setattr(kv_setup, "version", VERSIONS.__getitem__)
    monkeypatch.setattr(kv_setup, "chip", lambda: "golden chip")
    monkeypatch.setattr(kv_setup, "loaded_blas", str)
    (tmp_path / "config.json").write_bytes(b'{"model_type": "qwen3"}\n')
    (tmp_path / "tokenizer.json").write_bytes(b"does not count")
    write_weights(tmp_path, "model-00001-of-00002.safetensors", 1_000)
    write_weights(tmp_path, "model-00002-of-00002.safetensors", 2_000)
    return LoadedModel(
        model=None,
        tokenizer=None,
        generation_config={},
        config={},
        directory=tmp_path,
        identity=WeightsIdentity(tmp_path),
        facts=FACTS,
        dtype=ComputeDtype("bfloat16"),
    )


def write_weights(directory: Path, name: str, size: int, last: bytes = b"\0") -> None:
    """Weights of `size` bytes, zeros but for the last."""
    (directory / name).write_bytes(bytes(size - 1) + last)


def read_anew(model: LoadedModel) -> str:
    """The root of what is in the model's directory now."""
    return root(dataclasses.replace(model, identity=WeightsIdentity(model.directory)))


def root(model: LoadedModel, environ: Mapping[str, str] = DEFAULT) -> str:
    """The root of `model` under the settings in `environ`, in hex."""
    return kv_setup.cache_root(model, load_settings(environ, None)).hex()


def test_the_root_under_the_default_settings_is_what_it_was(model: LoadedModel) -> None:
    assert root(model) == ROOT


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KV_BITS": "8"}, "03bc830207053f76798a9d33dabdbbd8"),
        ({"KV_BITS": "4"}, "036a9877c596ce884b236e889422ee1b"),
        ({"QUANTIZED_KV_START": "0"}, "0312f0c2e16abf65c083bfc5b8279b57"),
        ({"KV_BITS": "8", "KV_GROUP_SIZE": "32"}, "0349f0599a2e4bdbe072d66e6818a7f8"),
        ({"RANKS": "2"}, "039bdb0a9411d60c9eed629a9e24a2cc"),
        ({"RANKS": "3"}, "038ae3f90293346f1d0d52e6b6df91d6"),
        ({"RANKS": "2", "RANK_SPLIT": "pipeline"}, "03663ffa814b90c8df7cc8bcf80f1f92"),
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
        {"RANK_SPLIT": "pipeline"},
        {"RANKS": "1"},
    ],
    ids=lambda environ: "-".join(environ),
)
def test_no_other_setting_changes_the_root(model: LoadedModel, environ: dict[str, str]) -> None:
    assert root(model, environ) == ROOT


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"path": "/models/other"}, "032fb35138df23eb2c3ea31065935f0e"),
        ({"cache_layout": "2 x ArraysCache, 2 x KVCache"}, "033a8aefb3e78c3c7efe645db92b732e"),
        ({"backend": "metal"}, "03bff545b5ca355d6d05197e8fd1f84b"),
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


def test_a_model_of_mlx_vlm_is_told_by_its_version_too(
    model: LoadedModel,
) -> None:
    language = VLMLanguageModel(model.model, list)
    assert root(dataclasses.replace(model, model=language)) == "03f059ef249b286ab4f61c1f26a5d0bc"


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("mlx", "03b518fee6e62ac9e64da8d178f4ef0d"),
        ("mlx-lm", "03aaf35052aca20fc1ba84d3935dde5d"),
        ("mlx-vlm", ROOT),
    ],
)
def test_each_version_gives_its_own_root(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, package: str, expected: str
) -> None:
    monkeypatch.setattr(kv_setup, "version", (VERSIONS | {package: "9.9.9"}).__getitem__)
    assert root(model) == expected


def test_the_weights_are_told_by_the_config_and_by_the_bytes_of_each_file(
    model: LoadedModel,
) -> None:
    first, second = sorted(path.name for path in model.directory.glob("*.safetensors"))
    write_weights(model.directory, second, 2_001)
    assert read_anew(model) == "03fccdf27ccd9d964e35f6d3548256bc"
    write_weights(model.directory, second, 2_000, b"\1")
    assert read_anew(model) == "0340544f4321373290b1f5b32e85f072"
    (model.directory / second).unlink()
    assert read_anew(model) == "03c3b86e57400c72ac0f093269bab2fb"
    (model.directory / first).rename(model.directory / "model.safetensors")
    assert read_anew(model) == "037a4b05432519390d2ea1148bff246f"
    (model.directory / "config.json").write_bytes(b"{}\n")
    assert read_anew(model) == "03217e9d782f8c73adc5284be5bef523"


def test_the_dtype_and_the_device_decide_the_last_bits(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = dataclasses.replace(model, dtype=ComputeDtype("float16", is_cast=True))
    assert root(cast) == "03d5cca056b8f48957a695cd495c515b"
    monkeypatch.setattr(kv_setup, "chip", lambda: "another")
    assert root(model) == "03d71a0813d288da4ea4e71d82b52d2b"


def test_the_blas_decides_the_last_bits_on_the_cpu_alone(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    metal = dataclasses.replace(model, facts=dataclasses.replace(FACTS, backend="metal"))
    before = root(metal)
    monkeypatch.setattr(kv_setup, "loaded_blas", lambda: "golden BLAS")
    assert root(model) == "03d478d3d84f200aa1eaa4d2614a713a"
    assert root(metal) == before


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
