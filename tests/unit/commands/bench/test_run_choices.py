"""Models, servers and workloads of a run are chosen, and the file that it goes on with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.results import ModelFacts, Results, ServerFacts
from hearth.commands.bench.rounds import server_choice
from hearth.commands.bench.rounds.all_workloads import ALL_WORKLOADS, chosen_workloads
from hearth.commands.bench.rounds.model_facts import (
    BenchModel,
    chosen_models,
    kv_token_bytes,
    layers_kind,
)
from hearth.commands.bench.rounds.plan import ChosenServer
from hearth.commands.bench.rounds.resumed_results import begun, differences, resumed
from hearth.commands.bench.rounds.server_choice import by_url, chosen_servers
from hearth.commands.bench.server import Server
from hearth.commands.bench.workload import SCALES, Start
from hearth.shared.errors import StartError

KNOWN = {
    name: Server(name, package=f"{name}==1" if name == "packaged" else "", program=program)
    for name, program in (("packaged", ""), ("hearth", ""), ("absent", "no-such-program"))
}

# ---------------------------------------------------------------- models


def write_model(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    (directory / "model.safetensors").write_bytes(b"0" * 100)
    return directory


def test_a_directory_is_told_by_its_name_and_its_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "Qwen-7B-4bit", quantization={"bits": 4, "group_size": 64})
    (model,) = chosen_models([str(path)])
    assert len(model.facts.digest) == 16
    assert replace(model.facts, digest="") == ModelFacts("Qwen-7B-4bit", "dense", "qwen3", 100, 4)
    assert model.directory == path


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_other_files_of_the_same_size_are_another_model(tmp_path: Path, name: str) -> None:
    path = write_model(tmp_path / "tiny")
    (path / name).write_bytes(b"0" * 1_000_000)
    (before,) = chosen_models([str(path)])
    (path / name).write_bytes(b"0" * 999_999 + b"1")
    (after,) = chosen_models([str(path)])
    results = begun("hearth bench", SCALES["quick"], 2)
    results.models["tiny"] = before.facts
    assert differences(results, results, [before], []) == []
    assert differences(results, results, [after], []) == ["tiny has other digest"]


def test_a_directory_of_strangers_steers_no_terminal(tmp_path: Path) -> None:
    path = write_model(tmp_path / "Qwen\x1b]0;x\x07", model_type="<b>" * 1_000)
    (model,) = chosen_models([str(path)])
    assert model.facts.label == "Qwen\ufffd]0;x\ufffd"
    assert len(model.facts.architecture) == 100


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / place / "tiny") for place in ("a", "b")]
    with pytest.raises(StartError, match="Two models are called tiny"):
        chosen_models([str(path) for path in paths])
    assert len(chosen_models([str(paths[0])] * 2)) == 1


@pytest.mark.parametrize("text", ["[]", "{", '"qwen3"'])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    path = write_model(tmp_path / "tiny")
    (path / "config.json").write_text(text)
    with pytest.raises(StartError, match=r"config\.json"):
        chosen_models([str(path)])


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(StartError, match="no-such-model"):
        chosen_models(["no-such-model"])


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, "dense"),
        ({"full_attention_interval": 4}, "hybrid"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "hybrid"),
        ({"mamba_d_ssm": 8}, "hybrid"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, "window"),
        ({"sliding_window": 4096}, "window"),
        ({"sliding_window": 4096, "use_sliding_window": False}, "dense"),
        ({"sliding_window": None, "layer_types": ["full_attention"]}, "dense"),
    ],
)
def test_what_layers_remember_makes_the_kind(config: dict[str, Any], kind: str) -> None:
    assert layers_kind(config) == kind


def test_kv_is_counted_in_layers_that_keep_all_tokens() -> None:
    config = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
    assert kv_token_bytes(config) == 2 * 4 * 2 * 8 * 2
    assert kv_token_bytes({**config, "full_attention_interval": 4}) == 2 * 1 * 2 * 8 * 2
    assert kv_token_bytes({**config, "torch_dtype": "float32"}) == 2 * 4 * 2 * 8 * 4


@given(
    st.dictionaries(
        st.sampled_from(("num_hidden_layers", "head_dim", "num_attention_heads", "layer_types")),
        st.none() | st.integers() | st.text() | st.booleans() | st.lists(st.text()),
    )
)
def test_any_config_has_a_size_and_a_kind(config: dict[str, Any]) -> None:
    assert kv_token_bytes(config) >= 1
    assert layers_kind(config) in ("dense", "hybrid", "window")


# ---------------------------------------------------------------- servers


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of this machine: what has a package is missing, the rest is there."""
    monkeypatch.setattr(server_choice, "is_installed", lambda server: server.name == "hearth")

    async def version(server: Server) -> str:
        return "1.0"

    monkeypatch.setattr(server_choice, "version_of", version)


def names_of(chosen: list[ChosenServer]) -> list[str]:
    return [each.server.name for each in chosen]


def test_hearth_stands_first_and_what_is_missing_is_installed_unless_it_is_quick() -> None:
    assert names_of(chosen_servers([], [], KNOWN, is_quick=False)) == ["hearth", "packaged"]
    assert names_of(chosen_servers([], [], KNOWN, is_quick=True)) == ["hearth"]
    (only,) = chosen_servers(["packaged"], [], KNOWN, is_quick=True)
    assert not only.is_there and only.install_bytes > 0 and only.version == "packaged 1"


def test_what_needs_torch_is_said_to_be_as_large_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.commands.bench.servers.install_server.sys.platform", "linux")
    server = Server("mlx-openai-server", package="no-such-package==1")
    (chosen,) = chosen_servers([server.name], [], {server.name: server}, is_quick=True)
    assert chosen.install_bytes > 5e9


@pytest.mark.parametrize(
    ("names", "urls", "told"),
    [
        (["other"], [], "there are packaged, hearth, absent"),
        (["absent"], [], "cannot be installed"),
        (["hearth"], ["hearth=http://127.0.0.1:1"], "Two servers are called hearth"),
    ],
)
def test_a_server_that_cannot_be_had_is_refused(
    names: list[str], urls: list[str], told: str
) -> None:
    with pytest.raises(StartError, match=told):
        chosen_servers(names, by_url(urls), KNOWN, is_quick=False)


def test_a_url_is_taken_without_its_version() -> None:
    (server,) = by_url(["mine=http://127.0.0.1:8000/v1"])
    assert (server.name, server.url) == ("mine", "http://127.0.0.1:8000")


@pytest.mark.parametrize("text", ["mine", "=http://a", "mine=a:1", "mine=ftp://a", "mine=http://"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(StartError, match="NAME=URL"):
        by_url([text])


# ---------------------------------------------------------------- workloads


def test_workloads_have_names_of_their_own_and_say_what_they_do() -> None:
    names = [workload.name for workload in ALL_WORKLOADS]
    assert len(set(names)) == len(names) >= 20
    assert all(workload.about.endswith(".") for workload in ALL_WORKLOADS)
    assert {workload.start for workload in ALL_WORKLOADS} == set(Start)


def test_what_is_asked_again_brings_what_read_it() -> None:
    chosen = [workload.name for workload in chosen_workloads(["kill", "restart"], is_quick=True)]
    assert chosen == ["answers", "restart", "before-kill", "kill"]


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(StartError, match="No workload is called nothing; there are linear"):
        chosen_workloads(["nothing"], is_quick=False)


def test_a_quick_run_plays_fewer_workloads() -> None:
    assert set(chosen_workloads([], is_quick=True)) <= set(chosen_workloads([], is_quick=False))


# ---------------------------------------------------------------- going on

MODEL = BenchModel(ModelFacts("tiny", "dense", "qwen3", 100), Path("/m"), 8)
HERE = ChosenServer(Server("hearth"), "1.0")


def kept(path: Path, **changes: Any) -> Results:
    results = replace(begun("hearth bench", SCALES["quick"], 2), **changes)
    results.models["tiny"] = MODEL.facts
    results.servers["hearth"] = ServerFacts("hearth", "1.0", "run", True)
    results.save(path)
    return results


def test_a_run_goes_on_with_its_file(tmp_path: Path) -> None:
    before = kept(tmp_path / "a.json")
    fresh = begun("hearth bench --rounds 5", SCALES["quick"], 5)
    found = resumed(tmp_path / "a.json", fresh, [MODEL], [HERE])
    assert (found.began, found.rounds, found.command) == (before.began, 5, fresh.command)
    assert resumed(tmp_path / "none.json", fresh, [MODEL], [HERE]) is fresh


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": "0.0.1"}, "version was 0.0.1"),
        ({"commit": "abc"}, "commit was abc"),
        ({"scale": "whole"}, "scale was whole and is quick"),
        ({"machine": "another"}, "machine was another"),
    ],
)
def test_a_file_of_another_run_is_not_gone_on_with(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    kept(tmp_path / "a.json", **changes)
    fresh = begun("hearth bench", SCALES["quick"], 2)
    with pytest.raises(StartError, match=told):
        resumed(tmp_path / "a.json", fresh, [MODEL], [HERE])


def test_another_model_or_server_of_the_same_name_is_told(tmp_path: Path) -> None:
    found = kept(tmp_path / "a.json")
    other = replace(MODEL, facts=replace(MODEL.facts, bytes=7, bits=4))
    newer = ChosenServer(Server("hearth"), "2.0")
    told = differences(found, found, [other], [newer])
    assert told == ["tiny has other bytes, bits", "hearth was 1.0 and is 2.0"]
    added = ChosenServer(Server("new"), "9")
    assert differences(found, found, [MODEL], [HERE, added]) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 99}', '{"format": 1, "models": 3}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(StartError, match="no file of `hearth bench`"):
        resumed(path, begun("hearth bench", SCALES["quick"], 2), [MODEL], [HERE])
    assert path.read_text() == text
