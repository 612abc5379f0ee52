"""One Chromium for all tests of the page to talk; each opens a tab in a profile of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

import pytest

from tests.helpers.chat_page.chat_tab import ChatTab
from tests.helpers.chat_page.hostile_server import HostileServer
from tests.helpers.clients.browser import chromium, page

TOLD: Final = "Failed to load"  # what a browser says of a 400, and of a connection that is cut
Steps = Callable[[ChatTab, HostileServer], Awaitable[Any]]


@pytest.fixture(scope="session")
def devtools() -> Iterator[str]:
    with chromium() as address:
        yield address


@pytest.fixture
def at_page(devtools: str) -> Callable[..., Any]:
    """Takes steps at the open page and its server, and returns what they give.

    `before` is a script that runs before the page's own. The console must stay clean.
    """

    async def whole(steps: Steps, models: tuple[Any, ...], before: str) -> Any:
        server = HostileServer(*models)
        async with server.running(), page(devtools) as tab:
            await tab.before_load(before)
            chat = ChatTab(tab, server.url)
            await chat.open()
            given = await steps(chat, server)
            assert [each for each in tab.errors if TOLD not in each] == []
            return given

    def run(steps: Steps, *models: Any, before: str = "0") -> Any:
        return asyncio.run(whole(steps, models, before))

    return run
