"""Tells LiteLLM of local answers, beside everything else, and has it check keys where they are its.

What a config has no use for is not told.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from hearth.proxy.gateway.accounts.litellm_keys import LiteLLMKeys
from hearth.proxy.gateway.accounts.local_account import LocalAccount
from hearth.proxy.gateway.config.config_file import leaves
from hearth.proxy.gateway.config.routing_table import Deployment
from hearth.proxy.gateway.litellm_messages import PATHS, AccountDialect, LocalAnswerLog
from hearth.proxy.gateway.litellm_process import LiteLLMLine, LiteLLMProcess
from hearth.proxy.http.http_exchange import ClientBody, HttpExchange
from hearth.shared.errors import RequestError

log = logging.getLogger(__name__)

LOGS_MAX: Final = 1_024  # answers that wait to be told or are being told
LOG_BYTES_MAX: Final = 64 * 1024 * 1024  # of their requests and answers together
AT_ONCE_MAX: Final = 16  # answers that callbacks are told of at the same time
LOG_S_MAX: Final = 60.0  # for all callbacks to take one
# What in a config has a use for each answer, by its name wherever that stands.
_CALLBACKS: Final = ("callbacks", "success_callback", "failure_callback")
_COUNTED: Final = (
    *("max_budget", "budget_duration", "budget_limit", "tpm", "rpm", "max_parallel_requests"),
    "optional_pre_call_checks",
)
_BLIND: Final = "simple-shuffle"  # the routing strategy that looks at no answer


class Accounts:
    """What LiteLLM is told of local answers, and asked about keys. Owner: our event loop.

    Invariant: at most LOGS_MAX answers and LOG_BYTES_MAX of their text wait; what is more is
    dropped, counted and warned of. Those of LiteLLM's keys are told without their texts instead:
    as many can wait as LiteLLM has let in.
    """

    def __init__(
        self, config: Mapping[str, Any], litellm: LiteLLMProcess, *, checks_keys: bool
    ) -> None:
        """`config` is the user's; `checks_keys` is whether clients' keys are LiteLLM's."""
        self.keys: LiteLLMKeys | None = None  # None: PROXY_API_KEY(S) are checked, or none
        given = {name: value for name, value in leaves(config) if value}
        if checks_keys:
            self.keys = LiteLLMKeys(litellm, str(given.get("litellm_key_header_name", "")))
        calls_back = not given.keys().isdisjoint(_CALLBACKS)
        counts = given.get("routing_strategy", _BLIND) != _BLIND
        counts = counts or not given.keys().isdisjoint(_COUNTED)
        self.tells = checks_keys or calls_back or counts
        # A callback may see what was asked and answered
        self.keeps_texts = calls_back and given.get("turn_off_message_logging") is not True
        self.on_lost: Callable[[str], None] = lambda why: None  # is told "dropped" or "failed"
        self.dropped = 0  # there was no room
        self._litellm = litellm
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._at_once = asyncio.Semaphore(AT_ONCE_MAX)

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
        if not self.tells:
            yield None
            return
        account = LocalAccount(deployment, exchange.request_id, dialect, body, self.keeps_texts)
        if self.keys is not None:
            path = exchange.path if dialect == "rerank" else PATHS[dialect]
            opening = self.keys.begin(exchange, path, deployment.group, dialect)
            account.line = await exchange.while_connected(opening)
        error: RequestError | None = RequestError("It ended by a bug.", status=500)
        try:
            yield account
            error = exchange.broken_by
        except RequestError as raised:
            error = raised
            raise
        finally:
            if account.is_told:
                self.tell(account.log(error), account.held_bytes, account.line)

    async def check(self, exchange: HttpExchange, group: str) -> None:
        """Let a request for `group` pass that is on no account: a count, or a prompt to be read.

        Raises:
            RequestError: the client's key of LiteLLM's may not ask for it.
        """
        if self.keys is not None:
            rows = exchange.raw_headers
            owner = self.keys.identity(rows, exchange.path, exchange.method, group)
            await exchange.while_connected(owner)

    def tell(self, answer: LocalAnswerLog, size: int, line: LiteLLMLine | None = None) -> None:
        """Have LiteLLM's callbacks, budgets and spend take `answer`, soon; never waits or raises.

        `size` is about how much memory it takes beside the answer's own words; its key's
        reservation is on `line`.
        """
        size += len(answer.text) + len(answer.thinking)
        size += sum(len(call["arguments"]) for call in answer.calls)
        if len(self._tasks) >= LOGS_MAX or self._bytes + size > LOG_BYTES_MAX:
            if line is None:
                self._drop()
                return
            answer, size = replace(answer, body={}, text="", thinking="", calls=()), 0
        self._bytes += size
        task = asyncio.create_task(self._tell(answer, size, line), name="litellm-log")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop(self) -> None:
        self.dropped += 1
        self.on_lost("dropped")
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            log.warning(
                "LiteLLM's callbacks are told of answers more slowly than they end: %d answers of "
                "%d bytes wait, limits %d and %d; %d were dropped. See to a faster callback.",
                *(len(self._tasks), self._bytes, LOGS_MAX, LOG_BYTES_MAX, self.dropped),
            )

    async def _tell(self, answer: LocalAnswerLog, size: int, line: LiteLLMLine | None) -> None:
        try:
            async with self._at_once:
                line = line or await self._litellm.line()
                await line.ask("log", answer, LOG_S_MAX, size)
        except RequestError as error:
            self.on_lost("failed")
            log.warning(
                "LiteLLM's callbacks did not take the answer id=%s: %s", answer.request_id, error
            )
        finally:
            self._bytes -= size
            if line is not None:
                line.close()

    async def close(self, wait_s: float) -> None:
        """Tell what waits within `wait_s`; what is left is dropped and counted."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=wait_s)
        for task in late:
            task.cancel()
        self.dropped += len(late)
        await asyncio.gather(*late, return_exceptions=True)
