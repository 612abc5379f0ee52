"""Host files are read as mlx.launch reads them, and no tensor takes a public address."""

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import StartError
from hearth.worker.ranks.rank_hosts import are_local, check_address, plan_tensors, read_hosts

pytestmark = pytest.mark.process

TWO = [{"ssh": "a", "ips": ["192.168.2.1"]}, {"ssh": "b", "ips": ["192.168.2.2"]}]


def written(path: Path, content: Any) -> Path:
    file = path / "hosts.json"
    file.write_text(json.dumps(content))
    return file


def test_without_a_file_all_ranks_are_on_this_machine() -> None:
    hosts = read_hosts(None, 3)
    assert [host.name for host in hosts] == ["127.0.0.1"] * 3
    assert are_local(hosts) == (True, True, True)


@pytest.mark.parametrize("content", [TWO, {"hosts": TWO, "backend": "ring", "envs": []}])
def test_both_shapes_of_a_host_file_are_read(tmp_path: Path, content: Any) -> None:
    hosts = read_hosts(written(tmp_path, content), 2)
    assert [host.addresses for host in hosts] == [("192.168.2.1",), ("192.168.2.2",)]
    assert are_local(hosts) == (True, False)


def test_a_host_that_is_named_by_its_address_needs_no_ips(tmp_path: Path) -> None:
    content = [{"ssh": "169.254.7.1"}, {"ssh": "169.254.7.2", "ips": []}]
    hosts = read_hosts(written(tmp_path, content), 2)
    assert [host.name for host in hosts] == ["169.254.7.1", "169.254.7.2"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (TWO[:1], "names 1 ranks and RANKS is 2"),
        ("text", "neither a list of hosts nor"),
        ([1, 2], "rank 0 is 1; needed is"),
        ([{"ssh": "mac.local"}, TWO[1]], "rank 0: 'mac.local' is no IP address"),
        ([TWO[0], {"ips": ["0.0.0.0"]}], "rank 1: 0.0.0.0 is not private"),
        ([TWO[0], {"ips": ["8.8.8.8"]}], "rank 1: 8.8.8.8 is not private, and tensors travel in"),
        ([TWO[0], {"ips": "192.168.2.2"}], "ips and rdma are lists"),
        ([TWO[0], {"ips": [["192.168.2.2"]]}], "is no IP address"),
    ],
)
def test_a_host_file_that_will_not_do_says_why(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(StartError, match=r"^RANK_HOSTS: ") as caught:
        read_hosts(written(tmp_path, content), 2)
    assert says in str(caught.value)


def test_a_missing_or_broken_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("[")
    for name in ("missing", "broken"):
        with pytest.raises(StartError, match="cannot be read"):
            read_hosts(tmp_path / name, 2)


@given(st.ip_addresses())
def test_no_address_that_the_internet_reaches_is_taken(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    try:
        check_address(str(address), "here")
    except StartError:
        return
    assert not address.is_global and not address.is_unspecified and not address.is_multicast


def test_each_start_has_ports_of_its_own() -> None:
    hosts = read_hosts(None, 2)
    plans = [plan_tensors(hosts, are_local(hosts)) for _ in range(3)]
    assert len({address for plan in plans for (address,) in plan["addresses"]}) == 6


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([TWO[0], {"ips": ["192.168.2.2", "192.168.3.2"]}], "as many ips as the others"),
        ([{"ips": ["fe80::1"]}, {"ips": ["fe80::2"]}], "IPv4 addresses only"),
        ([TWO[0] | {"rdma": [None, "rdma_en2"]}, TWO[1]], "needs an rdma list of every rank"),
    ],
)
def test_hosts_without_what_a_backend_needs_are_refused(
    tmp_path: Path, rows: Any, says: str
) -> None:
    hosts = read_hosts(written(tmp_path, rows), 2)
    with pytest.raises(StartError, match=says):
        plan_tensors(hosts, (False, False))


def test_hosts_with_rdma_take_jaccl_which_is_told_devices_and_where_to_meet(
    tmp_path: Path,
) -> None:
    rows = [{"ips": ["127.0.0.1"], "rdma": [None, "rdma_en2"]}]
    rows.append({"ips": ["127.0.0.2"], "rdma": ["rdma_en3", None]})
    plan = plan_tensors(read_hosts(written(tmp_path, rows), 2), (True, False))
    assert plan["devices"] == [[None, "rdma_en2"], ["rdma_en3", None]]
    assert plan["coordinator"].startswith("127.0.0.1:")


def test_hosts_whose_rdma_lists_name_no_device_take_tcp(tmp_path: Path) -> None:
    rows = [{"ips": [f"127.0.0.{number}"], "rdma": [None, None]} for number in (1, 2)]
    plan = plan_tensors(read_hosts(written(tmp_path, rows), 2), (True, True))
    assert plan["backend"] == "ring"
