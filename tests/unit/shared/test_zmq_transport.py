"""Both ends over real sockets, and the rules for where a socket may be."""

import asyncio
import contextlib
import os
import queue
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from hearth.shared import zmq_transport
from hearth.shared.errors import StartError
from hearth.shared.private_files import own_run_directory, private_directory
from hearth.shared.wire_messages import PROTOCOL_VERSION, Cancel, Counted, Delta, Hello
from hearth.shared.zmq_transport import DealerLink, RouterPort, ipc_endpoint
from tests.helpers.services.zmq_exchange import exchange, until_received


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return ipc_endpoint(tmp_path / "w.sock")


@pytest.fixture
def port(endpoint: str) -> Iterator[RouterPort]:
    port = RouterPort(endpoint)
    yield port
    port.close()


def ignore(_frame: bytes) -> None:
    """Take a frame that the test does not ask about."""


def test_a_message_goes_there_and_back(port: RouterPort, endpoint: str) -> None:
    asyncio.run(exchange(port, endpoint))


def test_a_peer_that_never_came_is_reported_and_takes_everything(port: RouterPort) -> None:
    port.post(b"nobody", Counted("a", 1))
    port.poll(0)
    assert port.gone == {b"nobody"}


async def test_a_peer_that_stops_reading_counts_as_gone_within_bounds(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "QUEUE_FRAMES_MAX", 50)
    port = RouterPort(endpoint)

    link = DealerLink(endpoint, ignore)
    link.send(Hello(PROTOCOL_VERSION))
    ((peer, _),) = await asyncio.to_thread(until_received, port)
    text = "x" * 100_000
    for seq in range(20_000):
        port.post(peer, Delta("a", seq, "content", text))
        port.poll(0)
        if peer in port.gone:
            break
    assert peer in port.gone
    link.close()
    port.close()


@pytest.mark.process
async def test_a_line_that_broke_twice_holds_up_no_other(
    port: RouterPort, endpoint: str, tmp_path: Path
) -> None:
    """All links share zmq's one I/O thread: a link that nobody hears must not make it wait."""

    def break_off(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.close()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(60)
        listener.bind(str(tmp_path / "breaks.sock"))
        listener.listen()
        link = DealerLink(ipc_endpoint(tmp_path / "breaks.sock"), ignore)
        broken = asyncio.create_task(link.disconnected())
        await asyncio.to_thread(break_off, listener)
        await asyncio.wait_for(broken, 60)
        for _ in range(3):  # zmq connects anew by itself
            await asyncio.to_thread(break_off, listener)
        await exchange(port, endpoint)
        link.close()


async def test_bad_frames_are_dropped_and_counted(port: RouterPort, endpoint: str) -> None:
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(endpoint)
        stranger.send(b"\xc1 not msgpack")
        while not port.bad_frame_count:
            assert not await asyncio.to_thread(port.poll, 0.05)
    link = DealerLink(endpoint, ignore)
    link.send(Cancel("a"))
    received = await asyncio.to_thread(until_received, port)
    assert [message for _, message in received] == [Cancel("a")]
    link.close()
    assert port.bad_frame_count == 1


def test_the_socket_and_its_directory_are_for_this_user_only(tmp_path: Path) -> None:
    directory = private_directory(tmp_path / "run" / "4000")
    port = RouterPort(ipc_endpoint(directory / "w.sock"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "w.sock").stat().st_mode) == 0o600
    port.close()
    assert not (directory / "w.sock").exists()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        monkeypatch.setattr(zmq_transport, "SHORT_LINKS_DIR", Path(name) / "links")
        yield Path(name) / "links"


def test_a_path_too_long_for_a_socket_is_reached_by_a_link(links: Path, tmp_path: Path) -> None:
    directory = private_directory(tmp_path / ("ü" * 60) / "run" / "4000")
    endpoint = ipc_endpoint(directory / "w.sock")
    assert ipc_endpoint(directory / "w.sock") == endpoint
    assert stat.S_IMODE(links.stat().st_mode) == 0o700
    port = RouterPort(endpoint)
    assert stat.S_ISSOCK((directory / "w.sock").stat().st_mode)
    port.close()
    assert not (directory / "w.sock").exists()


def test_a_run_directory_that_others_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could put a directory of their own in the place of ours, and read what is sent."""
    own_run_directory(tmp_path, 4000)
    for mode, is_taken in ((0o777, False), (0o1777, True), (0o755, True)):
        tmp_path.chmod(mode)
        with contextlib.nullcontext() if is_taken else pytest.raises(StartError, match="Set RUN_"):
            own_run_directory(tmp_path, 4000)
    if os.getuid() == 0:  # whose directories everybody trusts
        os.chown(tmp_path, 4_711, -1)
    else:
        monkeypatch.setattr(zmq_transport, "private_directory", lambda path: path)
        monkeypatch.setattr(os, "getuid", lambda: 4_711)
    with pytest.raises(StartError, match=r"other users .* can change"):
        own_run_directory(tmp_path, 4000)


def test_a_directory_of_all_users_is_never_closed_to_them(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    for path in (shared, Path("/")):
        mode = path.stat().st_mode
        with pytest.raises(StartError, match=r"KV_CACHE_DIR: .* is for all users"):
            private_directory(path, "KV_CACHE_DIR")
        assert path.stat().st_mode == mode


def test_posting_wakes_the_owner_at_once_each_time(port: RouterPort) -> None:
    woken: queue.Queue[None] = queue.Queue()

    def wait() -> None:
        for _ in range(2):
            port.poll(30)
            woken.put(None)

    owner = threading.Thread(target=wait)
    owner.start()
    for _ in range(2):
        port.post(b"nobody", Counted("a", 1))
        woken.get(timeout=5)
    owner.join()
