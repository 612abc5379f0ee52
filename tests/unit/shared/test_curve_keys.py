"""Workers on the network: who has no key, or another's, gets nothing and does not start."""

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from hearth.commands.make_keys import make_keys
from hearth.shared import zmq_transport
from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.wire_messages import PROTOCOL_VERSION, Cancel, Hello, encode
from hearth.shared.zmq_transport import (
    PROXY_NAME,
    RANK_NAME,
    WORKER_NAME,
    CurveKeys,
    DealerLink,
    RouterPort,
    curve_keys,
)
from tests.helpers.servers.server import free_port
from tests.helpers.services.zmq_exchange import exchange

pytestmark = pytest.mark.process

WAIT_S = 0.7  # for what must not arrive


@pytest.fixture(scope="module")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "keys"
    make_keys(directory)
    return directory


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def port(endpoint: str, keys_dir: Path) -> Iterator[RouterPort]:
    port = RouterPort(endpoint, curve_keys(keys_dir, WORKER_NAME, PROXY_NAME))
    yield port
    port.close()


def strangers_keys(server_key: bytes) -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, secret, server_key)


def talk(port: RouterPort, endpoint: str, keys_dir: Path) -> None:
    """Have the proxy, with its keys, be heard and answered."""
    asyncio.run(exchange(port, endpoint, curve_keys(keys_dir, PROXY_NAME, WORKER_NAME)))


@pytest.mark.parametrize("attack", ["no key", "another's key", "another server's key"])
async def test_a_client_without_the_proxys_key_is_not_heard_and_hears_nothing(
    port: RouterPort, endpoint: str, keys_dir: Path, attack: str
) -> None:
    proxy = curve_keys(keys_dir, PROXY_NAME, WORKER_NAME)

    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    if attack != "no key":
        keys = strangers_keys(proxy.trusted) if attack == "another's key" else proxy
        server_key = zmq.curve_keypair()[0] if "server" in attack else proxy.trusted
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    dealer.connect(endpoint)
    for message in (Hello(PROTOCOL_VERSION), Cancel("a")):
        dealer.send(encode(message))
    heard = []
    for _ in range(int(WAIT_S / 0.05)):
        heard += await asyncio.to_thread(port.poll, 0.05)
    assert heard == [] and port.bad_frame_count == 0
    assert await dealer.poll(0) == 0
    dealer.close()
    context.term()


@pytest.mark.parametrize(
    "garbage",
    [
        *(b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" * 10_000),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + b"\x00" * 48,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + b"\x00" * 47 + b"\x06\xff" * 99,
    ],
)
def test_garbage_on_a_workers_port_reaches_nobody_and_ends_nothing(
    port: RouterPort, endpoint: str, keys_dir: Path, garbage: bytes
) -> None:
    where = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    strangers = [socket.create_connection(where, timeout=5) for _ in range(20)]
    for stranger in strangers:
        with contextlib.suppress(ConnectionError):  # it may be cut off amid it
            stranger.sendall(garbage)
    for _ in range(4):
        assert port.poll(0.05) == []
    talk(port, endpoint, keys_dir)
    for stranger in strangers:
        stranger.close()
    assert port.bad_frame_count == 0


def test_a_connection_that_shows_no_key_in_time_is_dropped_however_it_dawdles(
    endpoint: str, keys_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "HANDSHAKE_S_MAX", 0.3)
    port = RouterPort(endpoint, curve_keys(keys_dir, WORKER_NAME, PROXY_NAME))
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + b"\x00" * 47
    where = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
    with socket.create_connection(where, timeout=5) as slow:
        dropped_at = time.monotonic() + 5
        with pytest.raises(ConnectionError):  # a byte every 20 ms would take more than a second
            for octet in greeting:
                slow.sendall(bytes([octet]))
                time.sleep(0.02)
        assert time.monotonic() < dropped_at
    talk(port, endpoint, keys_dir)
    port.close()


async def test_a_replaced_worker_is_told_nothing_by_the_proxy(
    endpoint: str, keys_dir: Path
) -> None:
    """Who takes the worker's address has not the worker's secret: no prompt reaches them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    impostor = context.socket(zmq.ROUTER)
    _, secret = zmq.curve_keypair()
    impostor.setsockopt(zmq.CURVE_SERVER, 1)
    impostor.setsockopt(zmq.CURVE_SECRETKEY, secret)
    impostor.bind(endpoint)

    keys = curve_keys(keys_dir, PROXY_NAME, WORKER_NAME)
    link = DealerLink(endpoint, lambda _: None, keys)
    link.send(Hello(PROTOCOL_VERSION))
    assert await asyncio.to_thread(impostor.poll, int(WAIT_S * 1000)) == 0
    link.close()
    impostor.close()
    context.term()


@pytest.mark.parametrize("where", ["tcp://127.0.0.1:1", "tcp://0.0.0.0:1", "ws://127.0.0.1:1"])
def test_a_line_over_the_network_without_keys_is_refused_at_both_ends(where: str) -> None:
    with pytest.raises(StartError, match=r"no CURVE keys|allowed are ipc"):
        RouterPort(where)
    with pytest.raises(StartError, match=r"no CURVE keys|allowed are ipc"):
        DealerLink(where, lambda _: None)


def test_a_worker_process_on_tcp_without_keys_does_not_start(tmp_path: Path, endpoint: str) -> None:
    environment = {**os.environ, "CURVE_KEYS_DIR": str(tmp_path / "none")}
    done = subprocess.run(
        [sys.executable, "-m", "hearth.commands.main", "worker", endpoint],
        cwd=PROJECT_DIR,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == EXIT_CANNOT_START, done.stderr
    assert "CURVE keys" in done.stderr and "hearth keys" in done.stderr


def test_keys_are_made_for_this_user_alone_even_under_umask_000(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_keys(tmp_path / "a" / "keys")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        **{"a": 0o700, "keys": 0o700},
        **{f"{name}.key": 0o600 for name in (WORKER_NAME, PROXY_NAME, RANK_NAME)},
        **{f"{name}.key_secret": 0o600 for name in (WORKER_NAME, PROXY_NAME, RANK_NAME)},
    }
    with pytest.raises(StartError, match="remove them"):
        make_keys(tmp_path / "a" / "keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_secret_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    make_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / f"{WORKER_NAME}.key_secret"
    secret.chmod(mode)
    with pytest.raises(StartError, match="chmod 600"):
        curve_keys(tmp_path / "keys", WORKER_NAME, PROXY_NAME)
