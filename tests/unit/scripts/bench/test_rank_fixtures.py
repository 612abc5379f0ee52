"""Fixtures over ranks: what one rank has of each is whole, at two ranks and at three."""

import importlib.util
import pkgutil

import mlx_lm.models
import pytest

from scripts.bench.ranks.families import family_row
from scripts.bench.ranks.family_configs import FAMILIES, VOCAB_SIZE
from scripts.fixtures.rank_fixtures import RANKED, RANKED_NAMES

GROUP = 64  # elements of a packed row that share a scale
COUNTS = ("num_attention_heads", "num_key_value_heads", "linear_num_value_heads")
SPLIT_ROWS = ("intermediate_size",)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", RANKED_NAMES)
def test_heads_and_packed_rows_divide(name: str, ranks: int) -> None:
    config = RANKED[name]
    assert all(config[count] % ranks == 0 for count in COUNTS if count in config)
    assert all(config[row] % (ranks * GROUP) == 0 for row in SPLIT_ROWS)
    assert config["num_attention_heads"] * config["head_dim"] % (ranks * GROUP) == 0
    assert config["vocab_size"] % ranks == 0


def test_every_family_that_mlx_lm_divides_has_a_configuration() -> None:
    dividing = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        spec = importlib.util.find_spec(f"mlx_lm.models.{module.name}")
        assert spec is not None and spec.origin is not None
        with open(spec.origin) as file:
            if "    def shard(" in file.read():
                dividing.add(module.name)
    assert dividing == set(FAMILIES)
    assert VOCAB_SIZE % 2 == VOCAB_SIZE % 3 == 0


def test_a_row_compares_what_ranks_computed_with_one_rank() -> None:
    lone = {"weight_bytes": 100, "layer_bytes": 80, "kv_bytes": 40}
    lone |= {"logits": [1.0, 2.0], "tokens": [1, 2], "is_warm_cold": True}
    rank = lone | {"weight_bytes": 60, "layer_bytes": 40, "kv_bytes": 20, "logits": [1.0, 2.5]}
    row = family_row("x", lone, [rank, rank | {"tokens": [1, 3]}])
    assert (row["weights_of_rank"], row["kv_of_rank"]) == (60, 20)
    assert row["logits_differ_by"] == 0.5
    assert row["tokens_equal"] == row["tokens"] == 2
    assert row["are_ranks_equal"] and row["is_warm_cold"]


def test_a_row_of_a_family_that_cannot_compute_here_says_why() -> None:
    lone = {"weight_bytes": 100, "layer_bytes": 80}
    row = family_row("x", lone, [lone | {"error": "no Metal"}] * 2)
    assert row["error"] == "no Metal" and row["weights_whole"] == 100
