"""Talks over a link of the proxy and a worker's port: a message there, and one back."""

import asyncio

from hearth.shared.wire_messages import PROTOCOL_VERSION, Counted, Hello, Message, decode
from hearth.shared.zmq_transport import CurveKeys, DealerLink, RouterPort


def until_received(port: RouterPort) -> list[tuple[bytes, Message]]:
    for _ in range(1200):
        if received := port.poll(0.05):
            return received
    raise AssertionError("nothing came")


async def exchange(port: RouterPort, endpoint: str, keys: CurveKeys | None = None) -> None:
    came: asyncio.Queue[bytes] = asyncio.Queue()
    link = DealerLink(endpoint, came.put_nowait, keys)
    link.send(Hello(PROTOCOL_VERSION))
    ((peer, message),) = await asyncio.to_thread(until_received, port)
    assert message == Hello(PROTOCOL_VERSION)
    port.post(peer, Counted("a", 3))
    await asyncio.to_thread(port.poll, 0.1)
    assert decode(await asyncio.wait_for(came.get(), 60)) == Counted("a", 3)
    link.close()
