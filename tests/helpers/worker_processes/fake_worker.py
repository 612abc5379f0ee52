"""Runs a scripted worker over real ZeroMQ, with the command line of a real one, to test the proxy.

What it does is in the last message's text: words such as `n=3 delay=0.01 prefill=2 die=2`, or
`full=01` for workers 0 and 1. It says that half of each prompt was kept; with `wide=N` its words
have N characters. With `calls=N` it ends with calls of the request's first N tools. With `hang=1`
it counts no step from then on. All its requests but the oldest are told as waiting. Each image of a
prompt counts IMAGE_TOKENS. With FAKE_WORKER_LOG set it appends a JSON line with a time for
everything it receives. With FAKE_WORKER_END_S and FAKE_WORKER_END_CODE it ends that late, and with
that code, where it is told to. It does not start while the file FAKE_WORKER_REFUSES_WHILE is there.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import (
    PROTOCOL_VERSION,
    Admitted,
    CallStart,
    Cancel,
    Count,
    Counted,
    Delta,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Message,
    ModelFacts,
    Progress,
    Prompt,
    Renew,
    Status,
    Submit,
    TokenLogprob,
    Told,
    Usage,
    Welcome,
)
from hearth.shared.worker_files import leave_reason
from hearth.shared.zmq_transport import (
    LEASE_S,
    PROXY_NAME,
    WORKER_NAME,
    CurveKeys,
    RouterPort,
    curve_keys,
)

NAME = os.environ.get("PROXY_MODEL_ID") or "smollm2"
FACTS = ModelFacts(
    NAME, "builtin:smollm2", "qwen3", 32_768, 151_936, 27_400_000, 54_800_000, "4 x KVCache", "cpu"
)
SIGNATURE = "S1gnature0fThinking000"
IMAGE_TOKENS = 7
REQUESTS_MAX = 9  # that it says it takes; it takes all
MISSING = "/missing"  # a MODEL_PATH that cannot be loaded
Step = Message | float  # a message to send, or seconds to wait


def script_of(submit: Submit) -> dict[str, str]:
    """Return the words `name=value` of the last message, or of a raw prompt."""
    prompt = submit.prompt
    content = prompt.messages[-1].get("content", "") if prompt.messages else prompt.text or ""
    if type(content) is list:
        content = " ".join(part.get("text", "") for part in content)
    return dict(re.findall(r"([a-z_]+)=(\S+)", content))


def prompt_tokens(prompt: Prompt) -> int:
    raw = len(prompt.ids) + len((prompt.text or "").split())
    return raw + sum(len(json.dumps(row).split()) for row in prompt.messages)


def image_tokens(prompt: Prompt) -> int:
    """Return the tokens of the images that are shown. Raises KeyError: one did not come."""
    contents = (row["content"] for row in prompt.messages if type(row["content"]) is list)
    parts = [part for content in contents for part in content if part["type"] == "image"]
    return sum(IMAGE_TOKENS for part in parts if prompt.images[part["image"]])


def steps_of(submit: Submit, worker_id: int) -> Iterator[Step]:
    """Yield what the worker does for `submit`."""
    words = script_of(submit)
    name = submit.request_id
    if words.get("die") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if str(worker_id) in words.get("full", ""):
        text = "This worker is full, as asked."
        yield Failed(name, 503, "overloaded", text, 7)
        return
    if "refuse" in words:
        status, _, code = words["refuse"].partition(":")
        retry_after_s = int(words["retry"]) if "retry" in words else None
        yield Failed(name, int(status), code, f"Refused as asked with {status}.", retry_after_s)
        return
    tokens = prompt_tokens(submit.prompt)
    yield Admitted(name, tokens, SIGNATURE)
    kept = tokens // 2
    yield Progress(name, kept, tokens)
    prefill_s = float(words.get("prefill", 0))
    for done in range(3):
        yield prefill_s / 3
        yield Progress(name, min(kept + done, tokens), tokens)
    if submit.prefill_only:
        usage = Usage(tokens, kept, tokens - kept, 0, source="ram", finish_ms=5)
        yield Finished(name, "prefilled", None, usage)
        return
    yield from _pieces(submit, words)
    count, reason_count = int(words.get("n", 3)), int(words.get("reason", 0))
    limit = submit.sampling.max_tokens
    reason = "length" if limit is not None and limit < count else "stop"
    said = reason_count + min(count, limit or count)
    calls = list(_calls(submit, words, said))
    yield from calls
    yield Finished(
        name,
        "tool_calls" if calls else reason,
        None,
        Usage(
            *(tokens, kept, tokens - kept, count + reason_count, reason_count, "ram"),
            image_tokens=image_tokens(submit.prompt),
            decode_forwards=count + reason_count,
        ),
    )


def _pieces(submit: Submit, words: dict[str, str]) -> Iterator[Step]:
    count = int(words.get("n", 3))
    if submit.sampling.max_tokens is not None:
        count = min(count, submit.sampling.max_tokens)
    thoughts = int(words.get("reason", 0))
    for index in range(thoughts + count):
        yield float(words.get("delay", 0))
        if words.get("die") == str(index + 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if words.get("fail") == str(index + 1):
            yield Failed(submit.request_id, 500, "internal_error", "Broke as asked.")
            return
        thinking = index < thoughts
        text = f"think{index} " if thinking else f"tok{index - thoughts} "
        text = text.ljust(int(words.get("wide", 0)))
        seq = index + (1 if words.get("lose") == str(index + 1) else 0)
        logprobs = []
        if submit.sampling.top_logprobs is not None and not thinking:
            top = [[7, text, text.encode(), -0.5]] * submit.sampling.top_logprobs
            logprobs = [TokenLogprob(7, text, text.encode(), -0.5, top)]
        channel = "reasoning" if thinking else "content"
        yield Delta(submit.request_id, seq, channel, text, logprobs)


def _calls(submit: Submit, words: dict[str, str], seq: int) -> Iterator[Step]:
    tools = submit.prompt.tools[: int(words.get("calls", 0))]
    for index, tool in enumerate(tools):
        call = CallStart(f"call{index}", tool["function"]["name"])
        for part, text in enumerate(("", '{"input": ', f'"a\\n{index}"', "}")):
            start = None if part else call
            yield Delta(submit.request_id, seq, "tool_call", text, call=start)
            seq += 1


class FakeWorker:
    """Runs the scripts of all requests in one thread."""

    def __init__(self, endpoint: str, worker_id: int, keys: CurveKeys | None) -> None:
        self._port = RouterPort(endpoint, keys)
        self._worker_id = worker_id
        self._boot_id = uuid.uuid4().hex
        self._peers: set[bytes] = set()
        self._running: dict[str, tuple[bytes, Iterator[Step], float]] = {}
        self._lease: dict[str, float] = {}
        self._log_path = os.environ.get("FAKE_WORKER_LOG")
        self._beat_at = 0.0
        self._steps = 0
        self._hangs = False
        self._prompts: dict[str, list[int]] = {}  # request id -> its "token ids"
        self._sessions: dict[str, list[str]] = {}  # session -> its request ids
        self._pins: dict[str, str] = {}  # request id -> whose pin it asked for

    def run(self) -> None:
        while True:
            for peer, message in self._port.poll(self._wait_s()):
                self._take(peer, message)
            self._beat()
            self._steps += not self._hangs
            for name in list(self._running):
                self._advance(name)

    def _wait_s(self) -> float:
        due = min((row[2] for row in self._running.values()), default=float("inf"))
        return max(0.0, min(due - time.monotonic(), 0.05))

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + 0.5
        for peer in self._peers:
            queue = list(self._running)[1:]  # one at a time, as it tells
            running = len(self._running) - len(queue)
            wait_s = 1.5 * len(queue)
            told = (running, len(queue), self._steps, 0, FACTS, wait_s, queue)
            self._port.post(peer, Heartbeat("ready", *told, requests_max=REQUESTS_MAX))

    def _take(self, peer: bytes, message: Message) -> None:
        self._note(message)
        if isinstance(message, Hello):
            self._peers.add(peer)
            self._beat_at = 0.0
            welcome = Welcome(PROTOCOL_VERSION, self._worker_id, self._boot_id, os.getpid())
            self._port.post(peer, welcome)
        elif isinstance(message, Submit):
            self._hangs |= "hang" in script_of(message)
            name, speaker = message.request_id, message.prompt.speaker
            self._prompts[name] = list(range(prompt_tokens(message.prompt)))
            self._sessions.setdefault(speaker.session, []).append(name)
            if message.pin:
                self._pins[name] = speaker.key
            now = time.monotonic()
            self._running[name] = (peer, steps_of(message, self._worker_id), now)
            self._lease[name] = now + LEASE_S
        elif isinstance(message, Cancel):
            self._running.pop(message.request_id, None)
        elif isinstance(message, Renew):
            for name in message.request_ids:
                self._lease[name] = time.monotonic() + LEASE_S
        elif isinstance(message, Count):
            self._port.post(peer, Counted(message.request_id, prompt_tokens(message.prompt)))
        elif isinstance(message, Status):
            self._port.post(peer, self._told(message))

    def _told(self, status: Status) -> Told | Failed:
        try:
            return Told(status.request_id, self._known(status))
        except KeyError:
            return Failed(status.request_id, 404, "not_found", "Not known.")

    def _known(self, status: Status) -> dict[str, Any]:
        """Tell about a cache in which each prompt is an entry of a byte a token, and a line.

        Raises KeyError: nothing is known of what is asked.
        """
        if status.what == "sessions":
            rows = [
                {"session": name, "client": "", "lines": len(ids)}
                for name, ids in self._sessions.items()
            ]
            return {"sessions": rows}
        if status.what in ("session", "tree"):
            lines = [{"request_id": name} for name in self._sessions[status.about]]
            return {"session": status.about, "lines": lines}
        if status.what == "prompt":
            return {"ids": self._prompts[status.about]}
        if status.what == "unpin":
            if status.key not in ("", self._pins[status.about]):
                raise KeyError(status.key)
            del self._pins[status.about]
        if status.what == "clear_cache":
            self._prompts.clear()
        entries = [{"tokens": len(ids), "bytes": len(ids)} for ids in self._prompts.values()]
        return {"bytes": sum(map(len, self._prompts.values())), "entries": entries}

    def _advance(self, name: str) -> None:
        peer, steps, due = self._running[name]
        if self._lease[name] < time.monotonic():
            self._note_row({"event": "lease_expired", "request_id": name})
            del self._running[name]
            self._port.post(peer, Finished(name, "cancelled", None, Usage(0, 0, 0, 0)))
            return
        while due <= time.monotonic():
            step = next(steps, None)
            if step is None:
                self._note_row({"event": "done", "request_id": name})
                del self._running[name]
                return
            if isinstance(step, float):
                due += step
            else:
                self._port.post(peer, step)
        self._running[name] = (peer, steps, due)

    def _note(self, message: Message) -> None:
        row = {"event": type(message).__name__} | dataclasses.asdict(message)
        if prompt := row.get("prompt"):
            files, prompt["images"] = prompt["images"], {}
            row["images"] = {name: sha256(data).hexdigest() for name, data in files.items()}
        self._note_row(row)

    def _note_row(self, row: dict[str, Any]) -> None:
        if self._log_path:
            with open(self._log_path, "a") as file:
                row = row | {"at": time.time(), "pid": os.getpid()}
                file.write(json.dumps(row, default=bytes.hex) + "\n")


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(0)


def _end(*_: object) -> None:
    time.sleep(float(os.environ.get("FAKE_WORKER_END_S", "0")))
    os._exit(int(os.environ.get("FAKE_WORKER_END_CODE", "0")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-id", type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    options = parser.parse_args()
    if os.path.exists(os.environ.get("FAKE_WORKER_REFUSES_WHILE", "")):
        sys.exit(78)
    if os.environ.get("MODEL_PATH") == MISSING:
        leave_reason(options.endpoint, f"MODEL_PATH is {MISSING!r}, which is no model.")
        sys.exit(78)
    signal.signal(signal.SIGTERM, _end)
    keys = None
    if options.endpoint.startswith("tcp://"):
        keys = curve_keys(load_settings(os.environ, None).curve_keys_dir, WORKER_NAME, PROXY_NAME)
    else:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    FakeWorker(options.endpoint, options.worker_id, keys).run()


if __name__ == "__main__":
    main()
