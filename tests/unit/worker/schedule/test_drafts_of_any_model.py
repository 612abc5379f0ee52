"""A model whose rows cannot be verified together, or taken back, is not drafted for."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache
from hearth.worker.schedule.answers.answer_drafts import AnswerDrafts, DraftPolicy
from hearth.worker.setup.rank_setup import SingleRank
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.fixtures.vision_families import make_family
from scripts.harness.socketless_worker import Answer, Machine, marks, vocabulary
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.models.oracle_drafts import OracleDrafts

TOKENS = 40
PROMPT = [(i * 7919 + 13) % 2900 + 50 for i in range(40)]
CLOSE = 1e-2  # of log probabilities, in fp32


@pytest.fixture(autouse=True)
def keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the machine run models whose caches are unknown, as a worker does that reuses none."""

    def layer_map(_rank: SingleRank, probe: list[Any]) -> LayerMap | None:
        with contextlib.suppress(UnknownCache):
            return LayerMap(probe)
        return None

    monkeypatch.setattr(SingleRank, "layer_map", layer_map)


def made(name: str, directory: Path) -> LoadedModel:
    make_family(name, directory, fixture_dir("qwen3") / "tokenizer.json")
    loaded = load_model(load_settings({"MODEL_PATH": str(directory)}, None))
    return dataclasses.replace(loaded, vision=None)


def answer(model: LoadedModel, drafts: AnswerDrafts, prediction: list[int]) -> Answer:
    machine = Machine(model, marks("qwen3"), vocabulary("qwen3"), keeps=False, drafts=drafts)
    return machine.ask(PROMPT, TOKENS, prediction=prediction)


def check(model: LoadedModel) -> None:
    plain = answer(model, AnswerDrafts(DraftPolicy()), [])
    prediction = [token if place % 9 else 77 for place, token in enumerate(plain.tokens)]
    for drafts in (
        AnswerDrafts(DraftPolicy("auto", "all", "all")),
        OracleDrafts(lambda _ids: plain.tokens, 0.3, (4, 2, 7)),
    ):
        drafted = answer(model, drafts, prediction)
        same = same_tokens(drafted, plain)
        np.testing.assert_allclose(drafted.logits[:same], plain.logits[:same], atol=CLOSE)


def test_llama_answers_with_drafts_as_it_does_without(tmp_path: Path) -> None:
    check(made("llava", tmp_path / "llava"))


def test_a_prediction_that_is_half_right_does_not_end_a_worker_whose_model_looks_across(
    tmp_path: Path,
) -> None:
    """Mllama's layers that attend to an image hold no rows of the text, of which none are cut."""
    check(made("mllama", tmp_path / "mllama"))


def test_tokens_of_a_draft_do_not_see_those_behind_them(tmp_path: Path) -> None:
    """PaliGemma attends both ways within a forward."""
    check(made("paligemma", tmp_path / "paligemma"))
