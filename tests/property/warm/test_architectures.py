"""Serves a tiny model of every architecture of mlx-lm and mlx-vlm, warm against cold.

docs/models.md shows what was recorded; here a row may not get worse, and no architecture is without
one: scripts/harness/architectures.py.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from scripts.docs.architectures_table import left_out, recorded
from scripts.harness.architectures import PROCESSED, made_and_served, names, told
from tests.helpers.by_day import by_day

# Rows; a window beside rows; a state beside rows.
BY_DAY: Final = ("mlx_lm/llama", "mlx_lm/gpt_oss", "mlx_lm/lfm2")
# Of the first tokens' log probabilities: rounding moves them by 3e-4 at most, over 178 models. A
# state of three tokens that is lost hardly shows in the tokens.
OFF_MAX: Final = 1e-3
# Upstream their answers hang on where a prompt is cut, whoever caches: the mask of plamo3's windows
# is a token wider than their caches.
CUT_SENSITIVE: Final = {"mlx_lm/plamo3"}
SAID_MIN: Final = 5  # tokens in 60: fewer would hardly depend on the prompt
# Random weights repeat one token, whose log probability tells one prompt from another.
REPEATS: Final = {"mlx_vlm/zaya1_vl"}
# The part of kept KV by what the evictor calls it.
EVICTED: Final = {"rows": {"copy", "extent"}, "windows": {"window"}, "states": {"snapshot"}}

# Gemma 4's feature extractor and Kimi-VL's processor, upstream.
pytestmark = [
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values"),
    pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated"),
]


@pytest.mark.parametrize("name", by_day(names(), BY_DAY))
def test_a_model_reads_only_what_is_new_says_what_it_says_cold_and_moves_its_counters(
    name: str, tmp_path: Path
) -> None:
    why = left_out().get(name)
    if why is not None and "Metal" in why and mx.metal.is_available():
        pytest.skip("it is left out where there is no Metal")
    row = made_and_served(name, tmp_path / "model")
    if why is not None:
        assert row.get("reuse") != "full", f"it works: take it out of left_out.yaml ({why})"
        return
    assert row.get("reuse") == "full", row
    assert row["differ"] == []
    assert (row["off"] > OFF_MAX) == (name in CUT_SENSITIVE), row
    assert row["said"] >= SAID_MIN or name in REPEATS, row
    moves_its_counters(row)


def moves_its_counters(row: dict[str, Any]) -> None:
    """Assert that each sort of KV that the model has was kept, put back and evicted."""
    assert row["kept"] and row["restored"] > 0, row
    for sort in row["kept"]:
        assert EVICTED[sort] & row["evicted"].keys(), (sort, row)


def test_each_architecture_that_can_be_made_has_full_reuse_or_is_in_a_list() -> None:
    rows = recorded()
    assert [*rows] == names(), "run python -m scripts.harness.architectures --record"
    short = {name for name, row in rows.items() if row.get("reuse") != "full"}
    assert short - left_out().keys() == set(), "they lost their reuse, or belong into left_out.yaml"
    assert left_out().keys() & rows.keys() - short == set(), "take them out of left_out.yaml"
    assert [name for name, row in rows.items() if row.get("differ")] == []


def test_each_architecture_of_the_installed_libraries_is_in_the_table_or_in_a_list() -> None:
    known = {each.split("/", 1)[1] for each in left_out()}
    has = {library: known | entries(library) for library in ("mlx_lm", "mlx_vlm")}
    missing = [f"mlx_lm/{name}" for name in text_models() if name not in has["mlx_lm"]]
    # Mlx-lm's model of a name stands for mlx-vlm's, unless that one sees.
    twins = {name.replace("-", "_") for name in text_models()}
    missing += [
        f"mlx_vlm/{package.name}"
        for package in packages()
        if package.name not in has["mlx_vlm"]
        and (package.name not in twins or any(package.glob("vision*")))
    ]
    assert missing == [], "write them into tests/data/architectures, configs.yaml or left_out.yaml"


def entries(library: str) -> set[str]:
    """Return the modules that the table's configurations are of."""
    own = {(more or {}).get("module", name) for name, more in told()[library].items()}
    if library == "mlx_vlm":
        own |= {family.config["model_type"] for family in PROCESSED.values()}
    return own


def text_models() -> list[str]:
    """Return the names of mlx-lm's modules that are an architecture's."""
    kind = re.compile(r"^(class ModelArgs\b|from .* import .*\bModelArgs\b)", re.MULTILINE)
    found = sorted((folder("mlx_lm") / "models").glob("*.py"))
    return [path.stem for path in found if kind.search(path.read_text("utf-8"))]


def packages() -> list[Path]:
    found = sorted((folder("mlx_vlm") / "models").iterdir())
    return [path for path in found if (path / "__init__.py").is_file()]


def folder(library: str) -> Path:
    spec = find_spec(library)
    assert spec is not None and spec.submodule_search_locations, library
    return Path(spec.submodule_search_locations[0])
