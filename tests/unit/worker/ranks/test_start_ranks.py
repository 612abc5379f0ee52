"""Followers compute by rank 0's settings and keep their machine's own; other models are refused."""

import dataclasses
from pathlib import Path

import pytest

from hearth.commands.ranks.join_ranks import endpoint_of
from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.ranks.loading.sharded_model import check_same_model
from hearth.worker.ranks.rank_link import pack, unpack
from hearth.worker.ranks.start_ranks import endpoints_of, told_settings, with_told

FACTS = {"dtype": "bfloat16", "config.json": "aa", "model.safetensors": "bb"}
HOSTS = ["192.168.2.1", "192.168.2.2"]


def test_what_decides_what_is_computed_is_rank_0s_and_the_rest_a_machines_own() -> None:
    leader = load_settings(
        {"DTYPE": "float16", "MODEL_PATH": "/a", "MEMORY_LIMIT_MB": "1", "KV_CACHE_DIR": "/kv0"},
        None,
    )
    own = load_settings({"MEMORY_LIMIT_MB": "2", "KV_CACHE_DIR": "/kv1"}, None)
    told = unpack(pack(told_settings(leader)))
    settings = with_told(own, told)
    assert (settings.dtype, settings.model_path) == ("float16", "/a")
    assert (settings.memory_limit_mb, settings.kv_cache_dir) == (2, Path("/kv1"))
    assert told_settings(settings) == told_settings(leader)


@pytest.mark.parametrize("secret", ["proxy_api_key", "proxy_api_keys", "allow_model_code"])
def test_neither_keys_nor_leave_to_run_code_are_told(secret: str) -> None:
    settings = load_settings({}, None)
    assert secret in {field.name for field in dataclasses.fields(settings)}
    assert secret not in told_settings(settings)


def test_settings_that_a_rank_does_not_know_are_refused() -> None:
    settings = load_settings({}, None)
    for told in ({**told_settings(settings), "allow_model_code": ("x",)}, {"dtype": "auto"}):
        with pytest.raises(StartError, match="update both"):
            with_told(settings, told)


def test_ranks_of_one_machine_meet_at_a_socket_and_others_at_a_port(tmp_path: Path) -> None:
    settings = load_settings({"RUN_DIR": str(tmp_path), "PROXY_PORT": "4007"}, None)
    assert endpoints_of(settings, 3)[0] == f"ipc://{tmp_path}/4007/ranks-3.sock"
    elsewhere = dataclasses.replace(settings, rank_hosts=tmp_path / "hosts.json", proxy_port=4011)
    assert endpoints_of(elsewhere, 0, "192.168.2.1") == (
        "tcp://192.168.2.1:4111",
        "tcp://192.168.2.1:0",
    )


def test_a_rank_with_the_same_model_takes_part() -> None:
    check_same_model(FACTS, [dict(FACTS)], HOSTS)


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
        check_same_model(FACTS, [FACTS | change], HOSTS)
    text = str(caught.value)
    assert text.startswith("Rank 1 of 2 (192.168.2.2) cannot take part: ") and says in text


@pytest.mark.parametrize("host", ["192.168.2.1", "fe80::1", "fd00::1:2"])
def test_what_rank_0_says_to_join_by_is_an_address_that_join_takes(
    tmp_path: Path, host: str
) -> None:
    settings = load_settings({"RUN_DIR": str(tmp_path)}, None)
    elsewhere = dataclasses.replace(settings, rank_hosts=tmp_path / "hosts.json", proxy_port=4011)
    endpoint = endpoints_of(elsewhere, 0, host)[0]
    assert endpoint_of(endpoint.removeprefix("tcp://"), settings) == endpoint
    assert endpoint_of(host, elsewhere) == endpoint
