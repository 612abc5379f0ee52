"""Runs Open WebUI as its users do, set up for a server of ours, and talks to it as its page does.

It is far too large for the tests' own environment (3 GB): HEARTH_OPEN_WEBUI names a venv of its
own, made by `pip install torch open-webui==VERSION` with a torch without CUDA.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.helpers.servers.server import free_port

VERSION: Final = "0.12.4"
VENV: Final = os.environ.get("HEARTH_OPEN_WEBUI", "")
NEEDS_OPEN_WEBUI: Final = pytest.mark.skipif(
    not VENV, reason=f"HEARTH_OPEN_WEBUI names no venv with open-webui {VERSION}"
)
START_WAIT_S_MAX: Final = 180.0  # 12 s on an idle machine
ANSWER_WAIT_S_MAX: Final = 180.0  # tenths of a second on an idle machine
POLL_S: Final = 0.1


@dataclass(frozen=True)
class Asked:
    """A question in a chat, by the ids that the page gives its messages."""

    chat_id: str
    answer_id: str


class OpenWebUI:
    """One `open-webui serve` in a directory of its own, signed in as its first user."""

    def __init__(self, **environment: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hearth-open-webui-"))
        self.log = self.directory / "log"
        self.url = f"http://127.0.0.1:{free_port()}"
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory / "home"),
            "DATA_DIR": str(self.directory / "data"),
            "WEBUI_SECRET_KEY": uuid.uuid4().hex,
            "OFFLINE_MODE": "true",  # asks no hub for a model
            "ANONYMIZED_TELEMETRY": "false",
            **environment,
        }
        self.client = httpx.Client(base_url=self.url, timeout=ANSWER_WAIT_S_MAX)
        (self.directory / "home").mkdir()
        program = Path(VENV) / "bin" / "open-webui"
        port = self.url.rpartition(":")[2]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "serve", "--host", "127.0.0.1", "--port", port],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> "OpenWebUI":
        try:
            self._until(self._is_up, START_WAIT_S_MAX)
            person = {"name": "Ann", "email": "ann@example.com", "password": "Secret-1234"}
            token = self._post("/api/v1/auths/signup", person)["token"]
            self.client.headers["authorization"] = f"Bearer {token}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._process.kill()  # nothing of it is wanted any more
        self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    # ------------------------------------------------------------ models and chats

    def models(self) -> list[dict[str, Any]]:
        """Return the models that a user can choose."""
        return list(self._get("/api/models")["data"])

    def streamed(self, model: str, text: str) -> list[str]:
        """Return the pieces in which the answer to `text` came, outside of any chat."""
        body = {"model": model, "stream": True, "messages": [{"role": "user", "content": text}]}
        with self.client.stream("POST", "/api/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            return list(_pieces(answer.iter_lines()))

    def ask(
        self,
        model: str,
        text: str,
        after: Asked | None = None,
        tools: Sequence[str] = (),
        files: Sequence[dict[str, Any]] = (),
    ) -> Asked:
        """Send `text` as the page does: into a new chat, or behind an answer of a chat."""
        parent = after.answer_id if after else None
        answer_id = str(uuid.uuid4())
        question = {
            "id": str(uuid.uuid4()),
            "parentId": parent,
            "role": "user",
            "content": text,
            "timestamp": int(time.time()),
            "models": [model],
            "files": list(files),
        }
        body = {
            "model": model,
            "stream": True,
            "messages": [{"role": "user", "content": text}],
            "session_id": "a page",
            "id": answer_id,
            "parent_id": parent,
            "user_message": question,
            "tool_ids": list(tools),
            "files": [row for row in files if row["type"] != "image"],
            "background_tasks": {},
        }
        if after is not None:
            body["chat_id"] = after.chat_id
        return Asked(self._post("/api/chat/completions", body)["chat_id"], answer_id)

    def answer(self, asked: Asked) -> dict[str, Any]:
        """Return the answer as the page shows it, once it is complete."""
        self._until(lambda: self._message(asked).get("done"), ANSWER_WAIT_S_MAX)
        return self._message(asked)

    def chat(self, asked: Asked) -> dict[str, Any]:
        return dict(self._get(f"/api/v1/chats/{asked.chat_id}"))

    # ------------------------------------------------------------ tools and documents

    def add_tool(self, name: str, source: str) -> None:
        """Add a tool that is written in Python, as a user does in the workspace."""
        row = {"id": name, "name": name, "content": source, "meta": {"description": name}}
        self._post("/api/v1/tools/create", row)

    def add_document(self, name: str, text: str) -> dict[str, Any]:
        """Return a file whose text has been cut up and embedded."""
        answer = self.client.post(
            "/api/v1/files/",
            params={"process": True, "process_in_background": False},
            files={"file": (name, text.encode(), "text/plain")},
        )
        document = dict(_json_of(answer))
        told = self._get(f"/api/v1/files/{document['id']}/process/status")
        assert told["status"] == "completed", f"{told}\n{self.log.read_text()}"
        return document

    # ------------------------------------------------------------ requests

    def _message(self, asked: Asked) -> dict[str, Any]:
        return dict(self.chat(asked)["chat"]["history"]["messages"][asked.answer_id])

    def _get(self, path: str) -> Any:
        return _json_of(self.client.get(path))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _json_of(self.client.post(path, json=body))

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"it ended:\n{self.log.read_text()}"
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").status_code == 200
        return False

    def _until(self, is_true: Callable[[], Any], wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not is_true():
            assert time.monotonic() < deadline, f"after {wait_s} s:\n{self.log.read_text()}"
            time.sleep(POLL_S)


def _json_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    return answer.json()


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """Yield the texts of an answer's events."""
    data = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
    for event in (json.loads(row) for row in data if row != "[DONE]"):
        for choice in event.get("choices", ()):
            if text := choice["delta"].get("content"):
                yield text
