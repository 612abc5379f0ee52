"""Tests of what is said of the builtin models."""

import pytest

from hearth.shared import machine
from hearth.shared.models.model_path import CATALOGUE, first_model_words, recommended

GB = 1024**3


def test_on_a_cpu_the_smallest_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "physical_bytes", lambda: 64 * GB)

    def version(name: str) -> str:
        raise machine.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(machine, "version", version)
        assert machine.bytes_for_models() == 64 * GB
    monkeypatch.setattr(machine, "version", lambda name: "0.32")
    model = recommended(machine.bytes_for_models())
    assert model is not None and model.alias == "qwen3.5-2b"


@pytest.mark.parametrize(
    ("memory_gb", "alias"),
    [
        *((4, None), (8, "qwen3.5-2b"), (16, "qwen3.5-9b"), (24, "gpt-oss-20b")),
        *((96, "gpt-oss-120b"), (128, "qwen3.8-flash-next"), (512, "qwen3.8-flash-next")),
    ],
)
def test_the_first_model_is_told_as_what_it_is_beside_the_one_that_fits(
    memory_gb: int, alias: str | None
) -> None:
    words = first_model_words(memory_gb * GB)
    assert words.startswith("SmolLM2-135M: a real language model, tiny, fluent and often wrong;")
    assert words.endswith(
        "it shows the server." if alias is None else f"For this machine: `hearth run {alias}`."
    )


def test_the_recommended_model_fits() -> None:
    for memory_gb in range(1, 600):
        model = recommended(memory_gb * GB)
        assert model is None or model.memory_gb <= memory_gb + 1
        assert (model is None) == (memory_gb + 1 < min(each.memory_gb for each in CATALOGUE))
