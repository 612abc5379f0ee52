"""A model whose rows cannot be verified together, or taken back, is not drafted for."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.model_loader import load_model
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


@pytest.fixture(autouse=True)
def keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the machine run models whose caches are unknown, as a worker does that reuses none."""

    def layer_map(_rank: SingleRank, probe: list[Any]) -> LayerMap | None:
        with contextlib.suppress(UnknownCache):
            return LayerMap(probe)
        return None

    monkeypatch.setattr(SingleRank, "layer_map", layer_map)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llava", marks=pytest.mark.night),
        "mllama",  # its layers that attend to an image hold no rows of the text, to be cut
        "paligemma",  # it attends both ways within a forward: tokens see those behind them
    ],
)
def test_a_model_answers_with_drafts_as_it_does_without(name: str, tmp_path: Path) -> None:
    make_family(name, tmp_path / name, fixture_dir("qwen3") / "tokenizer.json")
    loaded = load_model(load_settings({"MODEL_PATH": str(tmp_path / name)}, None))
    model = dataclasses.replace(loaded, vision=None)

    def answer(drafts: AnswerDrafts, prediction: list[int]) -> Answer:
        machine = Machine(model, marks("qwen3"), vocabulary("qwen3"), keeps=False, drafts=drafts)
        return machine.ask(PROMPT, TOKENS, prediction=prediction)

    plain = answer(AnswerDrafts(DraftPolicy()), [])
    prediction = [token if place % 9 else 77 for place, token in enumerate(plain.tokens)]
    for drafts in (
        AnswerDrafts(DraftPolicy("auto", "all", "all")),
        OracleDrafts(lambda _ids: plain.tokens, 0.3, (4, 2, 7)),
    ):
        same_tokens(answer(drafts, prediction), plain)
