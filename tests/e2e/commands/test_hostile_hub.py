"""Pulls models from a hub that lies, and from one that hangs."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.hub.hub_pulls import (
    HUB_ID,
    PULL_S_MAX,
    SHARD_BYTES,
    SHARDS,
    PullHome,
    pull_home,
)

INTERRUPTED_S_MAX: Final = 45.0  # less than the hub hangs; its library waits longer here
PRECIOUS: Final = "precious.json"
OUT: Final = f"../../../../{PRECIOUS}"  # from a folder of the cache's repository
LIES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "a commit that leads out": {"": {"sha": OUT.removesuffix(".json")}},
    "a commit that is a number": {"": {"sha": 5}},
    "no files at all": {"": {"siblings": [1, 2]}},
    "a digest that leads out": {SHARDS[0]: {"lfs": {"sha256": OUT, "size": 9, "pointerSize": 1}}},
    "a git digest that is none": {"config.json": {"blobId": "HEAD"}},
    "a size below nothing": {SHARDS[0]: {"size": -5}},
    "a size that is text": {SHARDS[0]: {"size": "4000000"}},
    "weights among what git holds": {SHARDS[0]: {"lfs": None, "size": 10**9}},
}


@pytest.fixture
def user(tmp_path: Path) -> Iterator[PullHome]:
    with pull_home(tmp_path) as home:
        home.environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "300"  # what ends a wait is the test's
        yield home


@pytest.mark.parametrize(
    "lie",
    [pytest.param(each, marks=[pytest.mark.night] * ("leads out" not in each)) for each in LIES],
)
def test_what_is_no_listing_of_a_hub_is_told_and_nothing_is_written_outside_of_the_cache(
    user: PullHome, lie: str
) -> None:
    precious = user.home / PRECIOUS
    precious.write_text("precious")
    user.repository.lies = LIES[lie]
    assert "Traceback" not in user.must_refuse("what is no listing of a hub", "HF_ENDPOINT")
    assert precious.read_text() == "precious"
    assert {path.name for path in user.home.iterdir()} <= {PRECIOUS, "hf"}


@pytest.mark.night
def test_weights_that_the_index_names_and_the_hub_lacks_are_told_before_any_are_fetched(
    user: PullHome,
) -> None:
    missing = "model-00003-of-00003.safetensors"
    index = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": missing}}
    user.repository.files["model.safetensors.index.json"] = json.dumps(index).encode()
    user.must_refuse("is not whole on the hub", f"(1, as '{missing}')")
    assert not any(user.hub.served[name] for name in SHARDS)


@pytest.mark.night
def test_control_c_ends_a_pull_whose_hub_hangs_and_one_that_waits_for_another(
    user: PullHome,
) -> None:
    user.repository.hold_at = SHARD_BYTES // 4
    first = user.start("pull", HUB_ID)
    assert user.hub.reached.wait(PULL_S_MAX)
    second = user.start("pull", HUB_ID)
    assert second.stdout is not None
    while "waiting for it" not in second.stdout.readline():
        assert second.poll() is None
    for pull in (second, first):
        pull.send_signal(signal.SIGINT)
        said = "".join(pull.communicate(timeout=INTERRUPTED_S_MAX))
        assert pull.returncode == 130 and "Traceback" not in said, said
    user.repository.hold_at = 0
    user.must_pull()
