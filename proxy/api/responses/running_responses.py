"""Finds responses that are being made by their ids: to cancel, poll and follow them.

A background response is made for nobody who waits: its request goes on in an exchange of its own,
whose client is the log of its events. It is kept from its beginning on, so that a restart finds it.
"""

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, Final

from hearth.proxy.api.responses import responses_events
from hearth.proxy.api.responses.event_log import EventLog
from hearth.proxy.api.responses.response_store import BYTES_MAX, ResponseStore
from hearth.proxy.http.body_threads import work_on_body
from hearth.proxy.http.http_exchange import AsgiMessage, HttpExchange
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.proxy.request.session_id import key_digest
from hearth.shared.errors import RequestError
from hearth.shared.memory_by_owner import first_of_largest

log = logging.getLogger(__name__)

RUNNING_MAX: Final = 64  # in background, of all keys
KEY_RUNNING_MAX: Final = 16  # of one key
FOLLOW_S_MAX: Final = 300.0  # after its end, in which the events of a response can be followed
FOLLOWED_MAX: Final = 64  # that have ended, whose events are kept
FOLLOWED_BYTES_MAX: Final = 64 * 1024 * 1024  # of those
CANCEL_WAIT_S_MAX: Final = 5.0  # for an answer to end that was called back
CLOSE_WAIT_S_MAX: Final = 2.0  # for all of them, when the server stops

_WHOLE: Final = ("completed", "incomplete")
_BUG: Final = "The proxy failed at this request; its log says where."
_EntryKey = tuple[str, str]  # the digest of the API key, and the response's id
_Answer = Callable[[HttpExchange], Awaitable[None]]


class RunningResponse:
    """A response that is being made, or was a moment ago. Owner: the event loop.

    Invariant: `ended` is set once, to its last state.
    """

    def __init__(
        self,
        response: dict[str, Any],
        cancel: Callable[[], None],
        events: EventLog | None = None,
    ) -> None:
        """`cancel` has its answer end soon; `events` are those of one in background."""
        self.response = response  # as it is told until its end
        self.events = events
        self.is_cancelled = False  # by its id
        self.ended: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._cancel = cancel

    @property
    def is_running(self) -> bool:
        return not self.ended.done()

    def cancel(self) -> None:
        self.is_cancelled = True
        self._cancel()


class _Background:
    """The client of a background request's exchange: it takes the events, and leaves on demand.

    Owner: the event loop.
    """

    def __init__(self, exchange: HttpExchange) -> None:
        """Take over from the client of `exchange`."""
        self._left = asyncio.Event()
        self.exchange = exchange.detached(self._receive, self._send)
        self.events = EventLog()
        self.request: ParsedRequest | None = None
        self.running: RunningResponse | None = None  # once the request is accepted
        self.accepted = asyncio.Event()
        self.refusal = RequestError(_BUG, status=500, code="internal_error")  # where it is not

    def leave(self) -> None:
        self._left.set()

    async def _receive(self) -> AsgiMessage:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.body" and message["body"]:
            assert self.running is not None, "nothing is answered before it is accepted"
            if self.running.is_running:
                self.running.response["status"] = "in_progress"
            self.events.add(message["body"])


class RunningResponses:
    """The responses that are being made. Owner: the event loop.

    Invariants: one in background ends in exactly one state, which is kept; KEY_RUNNING_MAX of a key
    and RUNNING_MAX of all are in background; events of FOLLOWED_MAX are kept that have ended.
    """

    def __init__(self, stored: ResponseStore) -> None:
        self._stored = stored
        self._known: dict[_EntryKey, RunningResponse] = {}
        self._past: OrderedDict[_EntryKey, EventLog] = OrderedDict()  # of those that have ended
        self._jobs: dict[str, _Background] = {}  # by the id of their request
        self._tasks: dict[asyncio.Task[None], str] = {}  # and the digest of whose each is

    # ---------------------------------------------------------------- in background

    async def serve(self, exchange: HttpExchange, answer: _Answer, *, wants_events: bool) -> None:
        """Have `answer` go on in background, and tell the client what it will be known by.

        Raises:
            RequestError: too many are, or the request is refused before it begins.
        """
        self._check_room(key_digest(exchange.headers))
        job = self._jobs[exchange.request_id] = _Background(exchange)
        task = asyncio.create_task(self._run(job, answer), name="background response")
        self._tasks[task] = key_digest(exchange.headers)
        task.add_done_callback(self._tasks.pop)
        accepted = asyncio.create_task(job.accepted.wait())
        try:
            waiting = asyncio.wait({task, accepted}, return_when=asyncio.FIRST_COMPLETED)
            await exchange.while_connected(waiting)
        finally:
            accepted.cancel()
            if job.running is None:  # its client knows no id by which it could cancel it
                job.leave()
        if job.running is None:
            raise job.refusal
        if wants_events:
            await exchange.send_events(job.events.follow(-1))
        else:
            await exchange.send_json(200, job.running.response)

    def _check_room(self, key: str) -> None:
        own, count = list(self._tasks.values()).count(key), len(self._tasks)
        if own < KEY_RUNNING_MAX and count < RUNNING_MAX:
            return
        raise RequestError(
            f"{own} responses of this key, and {count} of all, run in background; this server runs "
            f"{KEY_RUNNING_MAX} of a key and {RUNNING_MAX} of all. Wait for one to end, or cancel "
            "one.",
            status=429,
            code="too_many_background_responses",
            param="background",
        )

    async def _run(self, job: _Background, answer: _Answer) -> None:
        """Have the request answered, and see to it that its response has an end."""
        error = job.refusal
        try:
            await answer(job.exchange)
        except RequestError as raised:
            error = raised
        except Exception:
            log.exception("a background response failed by a bug")
        finally:
            job.exchange.end()
            del self._jobs[job.exchange.request_id]
        if job.running is None:
            job.refusal = error
        else:
            self._end_background(job, job.running, error)

    def _end_background(
        self, job: _Background, running: RunningResponse, error: RequestError
    ) -> None:
        """Tell of an end that is in no event yet, and let the events go after a while."""
        assert job.request is not None, "it was accepted"
        if running.is_running:
            number = job.events.next_number
            response, frame = responses_events.broken_off(running.response, error, number)
            self.note_end(job.request, response)
            job.events.add(frame)
        job.events.end()
        entry_key = (job.request.prompt.speaker.key, running.response["id"])
        self._past[entry_key] = job.events
        asyncio.get_running_loop().call_later(FOLLOW_S_MAX, self._forget, entry_key)
        while self._past and (
            (is_long := len(self._past) > FOLLOWED_MAX)
            or sum(events.nbytes for events in self._past.values()) > FOLLOWED_BYTES_MAX
        ):
            rows = self._past.items()
            self._forget(first_of_largest((k[0], k, 1 if is_long else e.nbytes) for k, e in rows))

    def _forget(self, entry_key: _EntryKey) -> None:
        if self._past.pop(entry_key, None) is not None:
            del self._known[entry_key]

    async def accept(
        self, exchange: HttpExchange, request: ParsedRequest, model: str, size: int
    ) -> dict[str, Any]:
        """Return the response to `request`, of an exchange in background, as it begins: queued.

        Raises:
            RequestError: it could not be asked for.
        """
        job, key = self._jobs[exchange.request_id], request.prompt.speaker.key
        response = responses_events.opened(request, model, exchange.request_id)
        make = functools.partial(self._stored.made, request.body, response, "")
        entry = await work_on_body(size, make) if request.is_stored else None
        if entry is None:
            raise RequestError(
                "A response in background is kept until it is asked for, and this one would not "
                f"be: send store: true, and less than {BYTES_MAX // 2**20} MB in all, or leave "
                "background out.",
                code="unsupported_parameter",
                param="background",
            )
        self._stored.add(key, response, entry)
        for number, kind in enumerate(responses_events.QUEUED):
            job.events.add(responses_events.state(kind, number, response))
        job.request = request
        job.running = RunningResponse(dict(response), job.leave, job.events)
        self._known[key, response["id"]] = job.running
        job.accepted.set()
        return response

    # ---------------------------------------------------------------- all that stream

    @contextlib.contextmanager
    def streaming(
        self, request: ParsedRequest, response: dict[str, Any], cancel: Callable[[], None]
    ) -> Iterator[None]:
        """Have a response be known by its id while it streams to its client."""
        entry_key = (request.prompt.speaker.key, response["id"])
        assert entry_key not in self._known, entry_key
        running = self._known[entry_key] = RunningResponse(response, cancel)
        try:
            yield
        finally:
            del self._known[entry_key]
            if running.is_running:
                running.ended.cancel()

    def note_end(self, request: ParsedRequest, response: dict[str, Any]) -> None:
        """Keep `response`, in its last state, where it is to be, and tell who waits for its end."""
        key = request.prompt.speaker.key
        running = self._known.get((key, response["id"]))
        is_asked_for = running is not None and (running.is_cancelled or running.events is not None)
        if request.is_stored and (response["status"] in _WHOLE or is_asked_for):
            self._stored.keep(key, request.body, response)
        if running is not None:
            running.response = response
            running.ended.set_result(response)

    def running(self, key: str, response_id: str) -> RunningResponse | None:
        """Return the one in background that has not ended; None where there is none."""
        found = self._known.get((key, response_id))
        is_there = found is not None and found.events is not None and found.is_running
        return found if is_there else None

    def response(self, key: str, response_id: str) -> dict[str, Any]:
        """Return a response as it is now. Raises: RequestError: 404."""
        running = self.running(key, response_id)
        return running.response if running else self._stored.response(key, response_id)

    async def cancel(self, key: str, response_id: str) -> dict[str, Any]:
        """End a response that is being made, and return it; one that has ended as it is.

        Raises: RequestError: 404.
        """
        found = self._known.get((key, response_id))
        if found is None or not found.is_running:
            return self._stored.response(key, response_id)
        found.cancel()
        await asyncio.wait({found.ended}, timeout=CANCEL_WAIT_S_MAX)
        is_told = found.ended.done() and not found.ended.cancelled()
        return found.ended.result() if is_told else found.response | {"status": "cancelled"}

    async def delete(self, key: str, response_id: str) -> dict[str, Any]:
        """Forget a response; one in background is cancelled first. Raises: RequestError: 404."""
        if self.running(key, response_id) is not None:
            await self.cancel(key, response_id)
        self._forget((key, response_id))
        return self._stored.delete(key, response_id)

    def follow(self, key: str, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """Return the events of a response in background behind the one with that number.

        Raises: RequestError: 404, or none are kept.
        """
        found = self._known.get((key, response_id))
        if found is None or found.events is None:
            self._stored.response(key, response_id)
            raise RequestError(
                "The events of this response are not kept: those of responses in background are, "
                f"until {FOLLOW_S_MAX / 60:g} minutes after their end. Ask without stream.",
                code="unsupported_parameter",
                param="stream",
            )
        found.events.check(after)
        return found.events.follow(after)

    async def close(self) -> None:
        """Wait a moment for those in background to end: their answers were called back."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_WAIT_S_MAX)
