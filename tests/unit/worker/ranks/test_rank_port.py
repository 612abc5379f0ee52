"""Ranks on several machines know each other by one pair of keys; strangers are not heard."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from hearth.commands.make_keys import make_keys
from hearth.shared.errors import StartError
from hearth.shared.zmq_rank_port import RankContext, RankDealer, RankRouter
from hearth.shared.zmq_transport import RANK_NAME, CurveKeys, curve_keys

pytestmark = pytest.mark.process

WAIT_S = 0.5  # for what must not arrive
WAIT_S_MAX = 60.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> CurveKeys:
    directory = tmp_path_factory.mktemp("run") / "keys"
    make_keys(directory)
    return curve_keys(directory, RANK_NAME, RANK_NAME)


@pytest.fixture
def router(keys: CurveKeys) -> Iterator[RankRouter]:
    context = RankContext(keys, is_leader=True)
    router = RankRouter(context, "tcp://127.0.0.1:0")
    yield router
    router.close()
    context.close()


def test_a_rank_with_the_key_is_heard_and_known_by_its_address(
    keys: CurveKeys, router: RankRouter
) -> None:
    context = RankContext(keys, is_leader=False)
    dealer = RankDealer(context, router.endpoint, "127.0.0.2")
    dealer.send(b"hello")
    came = router.receive(WAIT_S_MAX)
    assert came is not None and came[1:] == ("127.0.0.2", b"hello")
    router.send(came[0], b"welcome")
    assert dealer.receive(WAIT_S_MAX) == b"welcome"
    dealer.close()
    context.close()


@pytest.mark.parametrize("knows_server", [True, False])
def test_a_stranger_is_not_heard(keys: CurveKeys, router: RankRouter, knows_server: bool) -> None:
    public, secret = zmq.curve_keypair()
    trusted = keys.public if knows_server else public
    context = RankContext(CurveKeys(public, secret, trusted), is_leader=False)
    dealer = RankDealer(context, router.endpoint)
    dealer.send(b"hello")
    assert router.receive(WAIT_S) is None
    dealer.close()
    context.close()


def test_there_is_no_connection_on_the_network_without_keys() -> None:
    context = RankContext(None, is_leader=True)
    with pytest.raises(StartError, match="has no CURVE keys"):
        RankRouter(context, "tcp://127.0.0.1:0")
    with pytest.raises(StartError, match="has no CURVE keys"):
        RankDealer(context, "tcp://127.0.0.1:4100")
    context.close()


def test_the_socket_of_ranks_on_one_machine_is_this_users_alone(tmp_path: Path) -> None:
    context = RankContext(None, is_leader=True)
    path = tmp_path / "ranks.sock"
    path.write_text("of a worker that died")
    router = RankRouter(context, f"ipc://{path}")
    assert path.stat().st_mode & 0o777 == 0o600
    router.close()
    assert not path.exists()
    context.close()


def test_a_port_that_another_server_has_is_told_with_its_setting(
    keys: CurveKeys, router: RankRouter
) -> None:
    context = RankContext(keys, is_leader=False)
    with pytest.raises(StartError, match=r"cannot be bound: Address .* in use\. Set PROXY_PORT"):
        RankRouter(context, router.endpoint)
    context.close()
