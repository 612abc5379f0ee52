"""Confirms counted runs with arrays: a small model whose rows and states have a true ratio.

The same session is played twice on the same simulated clock: counted, and with MLX's arrays, real
forwards, real decoding and files with bytes in them. Both must come to the same figures.
"""

from typing import Any, Final
from unittest import mock

import mlx.core as mx

from hearth.worker.disk import open_file_store
from scripts.harness.layouts.counted_engine import MACS, CountedEngine, TimedEngine
from scripts.harness.layouts.counted_worker import CountedWorker, counted, settings_of
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript

CACHE_MB: Final = 8_192  # of the real model's kept KV

# Small models by the real one that each stands for: fewer and narrower layers, so many that a state
# is worth about as many tokens' rows.
SMALL: Final = {
    "Qwen3.5-27B": ModelLayout(
        "like Qwen3.5-27B",
        "",
        {
            "model_type": "qwen3_5",
            "text_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "vocab_size": 3_072,  # of the fixtures' tokenizers
                "max_position_embeddings": 262_144,
                "rms_norm_eps": 1e-6,
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 6,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4,
                "full_attention_interval": 4,
                "tie_word_embeddings": True,
            },
        },
    ),
}


def confirmed(
    layout: ModelLayout, real: ModelLayout, session: SessionScript
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a session played counted, and of the same with arrays.

    The budgets of RAM and disk are those of the `real` layout, scaled to the small one.
    """
    scale = real.layers.row_bytes // layout.layers.row_bytes
    settings = {"CACHE_RAM_BUDGET_MB": str(max(1, CACHE_MB // scale))}
    with mock.patch.object(open_file_store, "GB", 1024**3 // scale):
        return _played(layout, session, settings, False), _played(layout, session, settings, True)


def _played(
    layout: ModelLayout, session: SessionScript, settings: dict[str, str], has_arrays: bool
) -> dict[str, Any]:
    mac, speed = MACS[64]
    mx.eval(layout.model.parameters())
    with counted(mac, has_arrays) as (clock, disk, directory):
        engine = (TimedEngine if has_arrays else CountedEngine)(layout, speed, clock)
        made = settings_of(directory, settings)
        with engine.stream():
            told = []
            for _ in range(2):  # the second one begins with what the first has left on disk
                worker = CountedWorker(layout, clock, engine, made, session)
                worker.play()
                worker.stop()
                told.append(
                    {
                        "kept_bytes_max": worker.kept_bytes_max,
                        "prefilled": [each.prefilled_tokens for each in worker.answered.values()],
                        "idle": worker.scheduler.idle_tokens,
                        "evictions": worker.manager.evictions,
                    }
                )
        return {
            "written": dict(disk.written),
            "read": dict(disk.read),
            "forwards": [tokens for tokens, _ in engine.forwards],
            "before and after a restart": told,
        }
