"""Sessions are cut and salted so that workloads share nothing and servers see the same."""

import json

import pytest

from hearth.commands.bench.workload import SCALES
from hearth.commands.bench.workloads.sessions import (
    SESSIONS_DIR,
    cut,
    loaded,
    salted,
)

NAMES = sorted(path.name.removesuffix(".jsonl.xz") for path in SESSIONS_DIR.glob("*.xz"))
QUICK, WHOLE = SCALES["quick"], SCALES["whole"]


# ---------------------------------------------------------------- shipped


@pytest.mark.parametrize("name", NAMES)
def test_a_salt_changes_nothing_but_where_it_stands(name: str) -> None:
    rows = cut(loaded(name), QUICK)
    for row, with_salt in zip(rows, salted(rows, "GRAIN "), strict=True):
        told = json.dumps(with_salt.body)
        tools = row.body.get("tools") or ()
        assert told.count("GRAIN ") == 1 + bool(tools)
        assert told.replace("GRAIN ", "") == json.dumps(row.body)
