"""Ranks start by what rank 0 decides, or are refused with the reason; people are told of them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx.utils import tree_flatten

from hearth.commands.ranks.join_ranks import endpoint_of
from hearth.shared.errors import StartError
from hearth.shared.settings import Settings, load_settings
from hearth.worker.disk.file_format import is_of_today
from hearth.worker.disk.open_file_store import GB
from hearth.worker.engine.model_loader import load_model
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.ranks.follower_main import open_followed_store
from hearth.worker.ranks.leading_kv import FollowerCommands, LeadingLayerMap, NamedCache, kinds_of
from hearth.worker.ranks.leading_rank import LeadingRank, rank_report, refuse_device
from hearth.worker.ranks.rank_link import Handle, RankMemory, pack, unpack
from hearth.worker.ranks.sharded_model import Sharded, check_same_model
from hearth.worker.ranks.start_ranks import (
    OFF,
    endpoints_of,
    refuse_settings,
    shared_settings,
    with_shared,
)
from hearth.worker.setup.doctor_setup import draft_policy
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.socketless_worker import loaded, machine
from tests.helpers.records.disk_records import ROOT


def settings(**environ: str) -> Settings:
    return load_settings({"RANKS": "2", **environ}, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("KV_BITS", "8"), ("DRAFT_MODEL", "/m"), ("ADAPTERS", "one=/a")],
)
def test_a_setting_that_ranks_cannot_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(StartError, match=f"RANKS is 2 and {name} is .* or set RANKS=1"):
        refuse_settings(settings(**{name: value}))
    refuse_settings(settings())


def test_ranks_on_cuda_are_refused_and_elsewhere_they_are_not() -> None:
    with pytest.raises(StartError, match=r"RANKS is 2, .* CUDA .* Set RANKS=1"):
        refuse_device(2, "cuda")
    refuse_device(2, "metal")
    refuse_device(2, "cpu")


def test_nothing_is_drafted_and_the_reason_names_ranks() -> None:
    engine: Any = None  # it is not asked
    policy = draft_policy(settings(), None, engine, is_exact=False, is_cpu=True)
    assert (policy.reach, policy.reach_max) == ("none", "none")
    assert "RANKS is 2" in policy.reason


def test_a_rank_that_cannot_load_its_part_is_named_with_its_reason() -> None:
    link: Any = Answers(["MODEL_PATH is too large for it.", {}, 0, 0, 0])
    rank = LeadingRank(link, SimpleNamespace(size=lambda: 2), "tensor")  # type: ignore[arg-type]
    with pytest.raises(StartError, match=r"Rank 1 \(there\) cannot load its part: MODEL_PATH is"):
        rank.joined(loaded("qwen3", tiny=True))


class Answers:
    """A link whose followers answer what they are given."""

    size, hosts = 2, ("here", "there")

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.rank_memory: dict[int, RankMemory] = {}

    def request(self, *_operation: Any, drops: Any = ()) -> list[Any]:
        return self._answers

    def send(self, *_operation: Any, drops: Any = ()) -> None:
        pass


def probe(name: str) -> NamedCache:
    return NamedCache(machine(name, tiny=True).engine.probe(), Handle(1))


def mapped(name: str, answer: Any) -> LeadingLayerMap:
    link: Any = Answers(answer)
    return LeadingLayerMap(probe(name), FollowerCommands(link))


def test_ranks_that_keep_other_kinds_of_things_are_refused() -> None:
    with pytest.raises(StartError, match="Rank 0 has layers that keep rows of every token, and"):
        mapped("qwen3", ["", [1, 1, 0], 1])
    with pytest.raises(UnknownCache, match="Strange on rank 1"):
        mapped("qwen3", ["Strange", [], 0])


def test_the_greediest_rank_decides_how_much_a_byte_of_rank_0_weighs() -> None:
    layers = LayerMap(probe("qwen3"))
    own = layers.slot_bytes(1 << 15, None)
    assert mapped("qwen3", ["", kinds_of(layers), 3 * own]).byte_share == 3
    rank = LeadingRank(Answers(), SimpleNamespace(size=lambda: 2), "tensor")  # type: ignore[arg-type]
    rank.start_memory = {1: RankMemory(1000, 400)}
    assert rank.limit(250) == 250 + 600
    rank.commands.link.rank_memory[1] = RankMemory(0, 0)  # type: ignore[index]
    assert rank.limit(250) == 250 + 600, "it has not looked yet"
    assert rank.limit(450) == 250 + 600, "the 200 bytes that rank 0 took since, it has taken too"
    rank.commands.link.rank_memory[1] = RankMemory(1000, 900)  # type: ignore[index]
    rank.byte_share = 2.0
    assert rank.limit(250) == 250 + 50


HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]


def test_each_rank_is_told_with_its_host_and_what_it_takes_of_what_it_may() -> None:
    report = rank_report(HOSTS, "tensor", 70, {1: RankMemory(100, 40), 2: RankMemory(100, 50)})
    assert (report["count"], report["split"]) == (3, "tensor")
    assert report["ranks"] == [
        {"rank": 0, "host": "10.0.0.1", "used_bytes": 70},
        {"rank": 1, "host": "10.0.0.2", "used_bytes": 40, "limit_bytes": 100},
        {"rank": 2, "host": "10.0.0.2", "used_bytes": 50, "limit_bytes": 100},
    ]
    assert report["off"] == OFF and all(OFF.values()), "each with its reason"


def test_each_rank_has_files_of_its_own_and_its_part_of_what_its_machine_allows(
    tmp_path: Path,
) -> None:
    environ = {"KV_CACHE_DIR": str(tmp_path), "MAX_KV_SIZE_GB": "12"}
    settings = load_settings(environ, None)
    stores = [open_followed_store(settings, rank, ROOT, "", HOSTS) for rank in (1, 2)]
    roots = [store.root for store in stores if store is not None]
    assert len({ROOT, *roots}) == 3, "no rank's file passes for another's"
    assert all(is_of_today(root.hex()) for root in roots)
    assert [store.bytes_max for store in stores if store is not None] == [6 * GB, 6 * GB]
    for store in stores:
        assert store is not None
        store.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-1-of-3", "rank-2-of-3"]


FACTS = {"dtype": "bfloat16", "config.json": "aa", "model.safetensors": "bb"}


def test_what_decides_what_is_computed_is_rank_0s_and_the_rest_a_machines_own() -> None:
    leader = load_settings(
        {"DTYPE": "float16", "MODEL_PATH": "/a", "MEMORY_LIMIT_MB": "1", "KV_CACHE_DIR": "/kv0"},
        None,
    )
    own = load_settings({"MEMORY_LIMIT_MB": "2", "KV_CACHE_DIR": "/kv1"}, None)
    told = unpack(pack(shared_settings(leader)))
    settings = with_shared(own, told)
    assert (settings.dtype, settings.model_path) == ("float16", "/a")
    assert (settings.memory_limit_mb, settings.kv_cache_dir) == (2, Path("/kv1"))
    assert shared_settings(settings) == shared_settings(leader)


@pytest.mark.parametrize("secret", ["proxy_api_key", "proxy_api_keys", "allow_model_code"])
def test_neither_keys_nor_leave_to_run_code_are_told(secret: str) -> None:
    settings = load_settings({}, None)
    assert secret in {field.name for field in dataclasses.fields(settings)}
    assert secret not in shared_settings(settings)


def test_settings_that_a_rank_does_not_know_are_refused() -> None:
    settings = load_settings({}, None)
    for told in ({**shared_settings(settings), "allow_model_code": ("x",)}, {"dtype": "auto"}):
        with pytest.raises(StartError, match="update both"):
            with_shared(settings, told)


def test_ranks_of_one_machine_meet_at_a_socket_and_others_at_a_port(tmp_path: Path) -> None:
    settings = load_settings({"RUN_DIR": str(tmp_path), "PROXY_PORT": "4007"}, None)
    assert endpoints_of(settings, 3)[0] == f"ipc://{tmp_path}/4007/ranks-3.sock"
    elsewhere = dataclasses.replace(settings, rank_hosts=tmp_path / "hosts.json", proxy_port=4011)
    assert endpoints_of(elsewhere, 0, "192.168.2.1") == (
        "tcp://192.168.2.1:4111",
        "tcp://192.168.2.1:0",
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.safetensors": "cc"}, "its model.safetensors is cc, and rank 0's is bb. Fetch"),
        ({"adapter.py": "dd"}, "its adapter.py is dd, and rank 0's is None. Fetch"),
        ({"dtype": "float16"}, "its dtype is float16, and rank 0's is bfloat16. Set DTYPE"),
    ],
)
def test_a_rank_with_another_model_is_refused_with_both_values(
    change: dict[str, str], says: str
) -> None:
    with pytest.raises(StartError) as caught:
        check_same_model(FACTS, [FACTS | change], HOSTS[:2])
    text = str(caught.value)
    assert text.startswith("Rank 1 of 2 (10.0.0.2) cannot take part: ") and says in text


@pytest.mark.parametrize("host", ["192.168.2.1", "fe80::1", "fd00::1:2"])
def test_what_rank_0_says_to_join_by_is_an_address_that_join_takes(
    tmp_path: Path, host: str
) -> None:
    settings = load_settings({"RUN_DIR": str(tmp_path)}, None)
    elsewhere = dataclasses.replace(settings, rank_hosts=tmp_path / "hosts.json", proxy_port=4011)
    endpoint = endpoints_of(elsewhere, 0, host)[0]
    assert endpoint_of(endpoint.removeprefix("tcp://"), settings) == endpoint
    assert endpoint_of(host, elsewhere) == endpoint


def group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def part(size: int, split: str = "tensor", name: str = "qwen3") -> Any:
    """Return what is loaded of a fixture."""
    return Sharded(group(size), split).load(Path(fixture_dir(name)), False)[0]


def nbytes(model: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def test_the_bytes_of_the_part_are_admitted_and_not_those_of_the_files() -> None:
    admitted: list[int] = []
    whole, half = part(1), Sharded(group(2), "tensor")
    settings = load_settings({"MODEL_PATH": str(fixture_dir("qwen3"))}, None)
    load_model(settings, admit=admitted.append, part=half)
    half = part(2)
    assert admitted == [nbytes(half)]
    split = nbytes(whole) - nbytes(half)
    kept = sum(
        array.nbytes
        for name, array in tree_flatten(whole.parameters())
        if "proj" not in name  # embeddings, head and norms are whole on each rank
    )
    assert split == (nbytes(whole) - kept) // 2


def test_all_parameters_are_counted_before_the_model_is_split() -> None:
    sharded = Sharded(group(2), "tensor")
    model, _, _ = sharded.load(Path(fixture_dir("qwen3")), False)
    assert sharded.parameter_count > sum(a.size for _, a in tree_flatten(model.parameters()))


def test_heads_that_do_not_divide_are_named_with_their_number() -> None:
    with pytest.raises(StartError, match="num_attention_heads=4, which is no multiple of it"):
        part(3)
    with pytest.raises(StartError, match="num_key_value_heads=2"):
        part(4)


def test_a_family_that_cannot_be_split_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "k2_horizon"}')  # mlx-vlm's
    with pytest.raises(StartError, match=r"type 'k2_horizon' over ranks .* Set RANKS=1"):
        Sharded(group(2), "tensor").load(tmp_path, False)
    with pytest.raises(StartError, match=r"type 'falcon_h1' over ranks .* Set RANKS=1"):
        part(2, name="falcon_h1")
    with pytest.raises(StartError, match=r"no pipeline for models of type 'qwen3' .*=tensor"):
        part(2, "pipeline")


def test_a_model_that_sees_is_loaded_without_its_tower() -> None:
    sharded = Sharded(group(2), "tensor")
    model, tokenizer, config = sharded.load(Path(fixture_dir("qwen3_5_vl")), False)
    assert "vision_config" in config and tokenizer.chat_template
    assert not [name for name, _ in tree_flatten(model.parameters()) if "vision" in name]


def test_a_pipeline_gives_a_rank_some_of_the_layers() -> None:
    whole, last = part(1, name="qwen3_moe"), part(2, "pipeline", "qwen3_moe")
    assert (len(whole.layers), len(last.layers)) == (4, 2)
