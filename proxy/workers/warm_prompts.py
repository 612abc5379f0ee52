"""Has every worker read and pin the prompts of WARM_PROMPTS as soon as it is ready."""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import orjson

from hearth.proxy.api import prefill_endpoint
from hearth.proxy.api.parse_any_dialect import BodyParser
from hearth.proxy.http.http_exchange import BODY_BYTES_MAX
from hearth.proxy.http.strict_json import parse_object
from hearth.proxy.pool.worker_link import WorkerLink
from hearth.proxy.request.model_names import ModelNames
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import RequestError, StartError, WorkerLost
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings_from_env import Settings

log = logging.getLogger(__name__)

_DIGEST_BYTES: Final = 6


class WarmPrompts:
    """Has each worker read the prompts of WARM_PROMPTS. Owner: the event loop.

    A worker reads one after the other, beside the clients' requests and by the same rules.
    """

    def __init__(self, settings: Settings, body_parser: BodyParser, names: ModelNames) -> None:
        """Raises: StartError: a file is not there, or holds what no API would take."""
        self._requests: dict[str, ParsedRequest] = {}  # by the id of the pin
        self.body_parser = body_parser
        self._names = names
        self.tasks: set[asyncio.Task[None]] = set()
        keys = settings.api_keys or ("",)
        for name in settings.warm_prompts:
            try:
                for body in _bodies(PROJECT_DIR / os.path.expanduser(name)):
                    for key in keys:  # each key has its own cache
                        self._add(body, key)
            except (OSError, orjson.JSONDecodeError, RequestError) as error:
                raise StartError(
                    f"WARM_PROMPTS names {name}, which cannot be read: {error}. Correct the file, "
                    "or take it out of WARM_PROMPTS."
                ) from None

    def _add(self, body: dict[str, Any], key: str) -> None:
        headers = {"x-api-key": key} if key else {}
        request = self.body_parser.read(
            prefill_endpoint.dialect_of(body, headers, {}), body, headers
        )
        model = self._names.check(body.get("model"))
        target = self._names.target(model)
        request = dataclasses.replace(
            prefill_endpoint.prepared(request),
            pin=True,
            target=self._names.model_of(target),
            adapter=self._names.adapter_of(target),
        )
        named = request.prompt.speaker.key.encode() + orjson.dumps(body)
        self._requests[f"warm-{blake2b(named, digest_size=_DIGEST_BYTES).hexdigest()}"] = request

    def begin(self, link: WorkerLink) -> None:
        """The worker is ready: have it read them, in the background."""
        if self._requests:
            task = asyncio.create_task(self._warm(link), name=f"warm {link.worker_id}")
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _warm(self, link: WorkerLink) -> None:
        failures = []
        facts = link.heartbeat.model if link.heartbeat is not None else None
        model = facts.name if facts is not None else ""
        mine = {
            pin_id: request
            for pin_id, request in self._requests.items()
            if request.target in ("", model)
        }
        for pin_id, request in mine.items():
            try:
                await _read(link, await self.body_parser.complete(request), pin_id)
            except WorkerLost:
                return  # the supervisor has said so, and the next one begins anew
            except RequestError as error:
                failures.append(f"{pin_id}: {error}")
        if failures:
            log.warning(
                "WARM_PROMPTS: worker=%d has not pinned %d of %d prompts; the first: %s",
                link.worker_id,
                len(failures),
                len(mine),
                failures[0],
            )
        else:
            log.info("warm worker=%d prompts=%d", link.worker_id, len(mine))


async def _read(link: WorkerLink, request: ParsedRequest, pin_id: str) -> None:
    """Have one prompt read and pinned. Raises RequestError."""
    answer = link.submit(request, pin_id)
    try:
        await answer.admitted()
        await answer.next_event()
    finally:
        answer.close()


def _bodies(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the request bodies in a file: one, or a list of them."""
    size = path.stat().st_size
    if size > BODY_BYTES_MAX:
        raise RequestError(f"it is {size:,} bytes, and {BODY_BYTES_MAX:,} are read at most")
    given = orjson.loads(path.read_bytes())
    for row in given if type(given) is list else [given]:
        yield parse_object(orjson.dumps(row))
