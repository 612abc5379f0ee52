"""Pulls a model and serves it: what was foretold of its context is what its server tells."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.hub.hub_pulls import HUB_ID, PullHome
from tests.helpers.hub.local_hub import HubRepository, LocalHub
from tests.helpers.servers.server import Server

FORETOLD = re.compile(r"It fits with a context of ([\d,]+) tokens")
# What the process takes beside its arrays is assumed before, measured then.
TOLERANCE = 0.15


def served_model(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/v1/models") as answer:
        row: dict[str, Any] = json.load(answer)["data"][0]
    return row


@pytest.mark.night
@pytest.mark.parametrize("limit_mb", [0, 400])
def test_the_context_that_is_foretold_is_the_one_that_is_served(
    tmp_path: Path, limit_mb: int
) -> None:
    files = {path.name: path.read_bytes() for path in fixture_dir("qwen3").iterdir()}
    with LocalHub({HUB_ID: HubRepository(files)}).running() as hub:
        user = PullHome(hub, tmp_path)
        user.environment["MEMORY_LIMIT_MB"] = str(limit_mb)
        status, said = user.pull()
    assert status == 0 and user.is_whole(), said
    foretold = FORETOLD.search(said)
    assert foretold is not None, said
    tokens = int(foretold[1].replace(",", ""))
    offline = {"HF_HOME": user.environment["HF_HOME"], "HF_HUB_OFFLINE": "1"}
    settings = {"MODEL_PATH": HUB_ID, "MEMORY_LIMIT_MB": str(limit_mb), **offline}
    with Server(**settings) as server:
        row = served_model(server)
        user.environment["RUN_DIR"] = str(server.run_dir / "run")
        _, listed = user.run("models")
        refused, why = user.run("rm", HUB_ID, "--yes")
    assert row["id"] == HUB_ID
    if limit_mb:
        assert row["meta"]["n_ctx_by"] == "memory"
        assert tokens == pytest.approx(row["context_length"], rel=TOLERANCE)
    else:
        assert tokens == row["context_length"]
    assert re.search(rf"{HUB_ID}.*served", listed), listed
    assert refused == 1 and "is being served" in why
