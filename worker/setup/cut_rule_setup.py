"""Makes the rule by which a loaded model's prompts are cut, and says what load may add to it."""

import dataclasses
from typing import Final

from hearth.shared.settings import Settings
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.prefill_lengths import prefill_lengths
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.setup.kv_setup import is_exact

BESIDE_GOAL_S: Final = 0.25  # of a prompt's forward that answers wait for


def cut_rule_of(loaded: LoadedModel, settings: Settings) -> CutRule:
    """Return the rule for this model on this chip; PREFILL_CHUNK says another chunk."""
    lengths = prefill_lengths(loaded)
    return CutRule(
        settings.prefill_chunk or lengths.chunk,
        turn_marks(loaded.tokenizer),
        lengths.gap,
        lengths.step_min,
        lengths.full_to,
    )


def with_goal_beside(
    config: SchedulerConfig, loaded: LoadedModel, settings: Settings
) -> SchedulerConfig:
    """Return the config in which prompts beside answers are read in forwards of BESIDE_GOAL_S.

    What is read so is fast KV, so that exact reuse has whole chunks only. A CPU's chunk is short.
    """
    if backend() == "cpu" or is_exact(loaded, settings):
        return config
    tokens_min = prefill_lengths(loaded).beside_min
    return dataclasses.replace(config, beside_goal_s=BESIDE_GOAL_S, beside_tokens_min=tokens_min)
