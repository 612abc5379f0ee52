"""Joins the parts of this folder: what of LiteLLM's accounts a config has a use for."""

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.gateway.accounts.litellm_keys import KeyCaller, KeyOwner, LiteLLMKeys
from hearth.proxy.gateway.accounts.litellm_usage import (
    AccountDialect,
    CloudUsage,
    KeyedCall,
    LocalAnswerLog,
    LocalAnswerLogs,
    section,
    wants_answers,
    wants_texts,
)
from hearth.proxy.gateway.accounts.local_account import LocalAccount
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.gateway.litellm_paths import PATHS
from hearth.proxy.gateway.litellm_thread import LiteLLMThread
from hearth.proxy.http.http_exchange import ClientBody, HttpExchange
from hearth.shared.errors import RequestError

# These import LiteLLM, so they are imported on its loop, where it is there already.
_EVENTS: Final = "hearth.proxy.gateway.accounts.litellm_events"
_AUTH: Final = "hearth.proxy.gateway.accounts.litellm_auth"


@dataclass(frozen=True, slots=True)
class Accounts:
    """What LiteLLM is told of local answers, and asked about keys. Owner: our event loop."""

    logs: LocalAnswerLogs | None  # None: nothing in the config has a use for them
    keys: LiteLLMKeys | None  # None: PROXY_API_KEY(S) are checked, or none
    keeps_texts: bool  # a callback may see what was asked and answered
    _loop: LiteLLMThread

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        loop: LiteLLMThread,
        ready: Callable[[], Awaitable[None]],
        *,
        checks_keys: bool,
    ) -> "Accounts":
        """`config` is the user's; `ready` returns once LiteLLM serves, or raises.

        `checks_keys` is whether clients' keys are LiteLLM's.
        """
        has_logs = checks_keys or wants_answers(config)
        logs = LocalAnswerLogs(loop, ready, _log_answer) if has_logs else None
        own_header = str(section(config, "general_settings").get("litellm_key_header_name") or "")
        keys = LiteLLMKeys(loop, ready, _Checks(), own_header) if checks_keys else None
        return cls(logs, keys, wants_texts(config), loop)

    @contextlib.asynccontextmanager
    async def telling(
        self,
        exchange: HttpExchange,
        dialect: AccountDialect,
        deployment: Deployment,
        body: ClientBody,
    ) -> AsyncIterator[LocalAccount | None]:
        """Have a local answer to `body` be told of when it ends; None where nobody wants to know.

        Raises:
            RequestError: the client's key of LiteLLM's may not ask for it now.
        """
        account = await self._open(exchange, dialect, deployment, body)
        error: RequestError | None = RequestError("It ended by a bug.", status=500)
        try:
            yield account
            error = exchange.broken_by
        except RequestError as raised:
            error = raised
            raise
        finally:
            if account is not None:
                account.end(error)

    async def _open(
        self,
        exchange: HttpExchange,
        dialect: AccountDialect,
        deployment: Deployment,
        body: ClientBody,
    ) -> LocalAccount | None:
        if self.logs is None:
            return None
        keyed = None
        if self.keys is not None:
            path = exchange.path if dialect == "rerank" else PATHS[dialect]
            caller = KeyCaller(exchange.method, path, exchange.raw_headers)
            asking = self.keys.begin(caller, deployment.group, dialect, exchange.request_id)
            _, keyed = await exchange.while_connected(asking)
        return LocalAccount(
            self.logs, deployment, exchange.request_id, dialect, body, self.keeps_texts, keyed
        )

    async def check(self, exchange: HttpExchange, group: str) -> None:
        """Let a request for `group` pass that is on no account: a count, or a prompt to be read.

        Raises:
            RequestError: the client's key of LiteLLM's may not ask for it.
        """
        if self.keys is not None:
            caller = KeyCaller(exchange.method, exchange.path, exchange.raw_headers)
            await exchange.while_connected(self.keys.owner(caller, group))

    async def watch_clouds(self, tell: Callable[[CloudUsage], None]) -> None:
        """Have `tell` called on this loop with what each cloud call costs, from now on."""
        ours = asyncio.get_running_loop()
        await self._loop.run(lambda: _watch_clouds(ours, tell))

    async def close(self, wait_s: float) -> None:
        """Tell what waits within `wait_s`."""
        if self.logs is not None:
            await self.logs.close(wait_s)


class _Checks:
    """The checks of keys, imported where they run."""

    async def owner(self, caller: KeyCaller, group: str) -> KeyOwner:
        found: KeyOwner = await importlib.import_module(_AUTH).owner(caller, group)
        return found

    async def begin(
        self, caller: KeyCaller, group: str, dialect: AccountDialect, request_id: str
    ) -> tuple[KeyOwner, KeyedCall]:
        begin: Any = importlib.import_module(_AUTH).begin
        found: tuple[KeyOwner, KeyedCall] = await begin(caller, group, dialect, request_id)
        return found


async def _log_answer(answer: LocalAnswerLog) -> None:
    await importlib.import_module(_EVENTS).log_answer(answer)


async def _watch_clouds(
    ours: asyncio.AbstractEventLoop, tell: Callable[[CloudUsage], None]
) -> None:
    importlib.import_module(_EVENTS).watch_clouds(lambda usage: _hand_over(ours, tell, usage))


def _hand_over(
    ours: asyncio.AbstractEventLoop, tell: Callable[[CloudUsage], None], usage: CloudUsage
) -> None:
    if not ours.is_closed():  # else the server has ended
        ours.call_soon_threadsafe(tell, usage)
