"""One gateway for all tests that leave it as they found it: local models and a mock cloud."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# Imported where they are used: the process that deals the tests out runs none, and all wait for it.
if TYPE_CHECKING:
    from tests.helpers.cloud.gateway_server import GatewayServer, TwoSidedServer
    from tests.helpers.servers.mock_cloud import MockCloud


@pytest.fixture(scope="session")
def shared_gateway() -> "Iterator[GatewayServer]":
    from tests.helpers.cloud.gateway_server import GatewayServer, MockCloud

    with MockCloud() as cloud, MockCloud() as tool, GatewayServer(cloud, tool) as server:
        yield server


@pytest.fixture(scope="session")
def shared_two_sided() -> "Iterator[TwoSidedServer]":
    from tests.helpers.cloud.gateway_server import MockCloud, TwoSidedServer

    with MockCloud() as cloud, TwoSidedServer(cloud) as server:
        yield server


# Each before a cloud without records and scripts.


@pytest.fixture
def gateway(shared_gateway: "GatewayServer") -> "GatewayServer":
    shared_gateway.cloud.forget()
    return shared_gateway


@pytest.fixture
def cloud(gateway: "GatewayServer") -> "MockCloud":
    return gateway.cloud


@pytest.fixture
def two_sided(shared_two_sided: "TwoSidedServer") -> "TwoSidedServer":
    shared_two_sided.cloud.forget()
    return shared_two_sided
