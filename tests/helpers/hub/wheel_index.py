"""Serves a package index with one wheel on this machine, and plants what goes wrong with it."""

import contextlib
import hashlib
import io
import random
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from hearth.shared.models.builtin_models import BuiltinModel

PACKAGE: Final = "tiny-sentence-encoder"
MEMBER: Final = "tiny/model.zip"
FILES: Final = {
    name: random.Random(name).randbytes(400)  # which does not shrink
    for name in (
        *("1_Pooling/config.json", "config.json", "config_sentence_transformers.json"),
        *("model.safetensors", "modules.json", "sentence_bert_config.json"),
        *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
    )
}


def archive(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        for name, content in files.items():
            about = zipfile.ZipInfo(name)  # of one date, so that its digest is one too
            about.compress_type = zipfile.ZIP_DEFLATED
            zipped.writestr(about, content)
    return made.getvalue()


def wheel_of(member: bytes, name: str = MEMBER) -> bytes:
    tags = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    about = f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n".encode()
    info = f"{PACKAGE.replace('-', '_')}-1.0.dist-info"
    facts = {f"{info}/METADATA": about, f"{info}/WHEEL": tags, f"{info}/RECORD": b""}
    code = {"tiny/__init__.py": b"raise SystemExit('this ran')"}
    return archive({name: member, **code, **facts})


def stand_in(wheel: bytes, member: bytes) -> BuiltinModel:
    """Return a builtin model that is made as minilm is, of a wheel of a few kilobytes."""
    return BuiltinModel(
        name="minilm",
        package=PACKAGE,
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_bytes=len(wheel),
        member=MEMBER,
        member_sha256=hashlib.sha256(member).hexdigest(),
        member_bytes=len(member),
        hub_id="owner/tiny-model",
        context_tokens=2_048,
    )


@dataclass
class WheelIndex:
    """An index; what its fields say is what it does with the next request."""

    wheel: bytes
    has_it: bool = True
    yanked: str = ""  # the reason
    sent: bytes = b""  # in the wheel's place
    cut_at: int = 0  # the connection breaks off behind so many bytes
    is_held: bool = False  # behind half of the wheel, until `ended`
    reached: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    downloads: int = 0
    url: str = ""

    @contextmanager
    def running(self) -> Iterator["WheelIndex"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.ended.set()
            server.shutdown()
            server.server_close()
            thread.join()

    def page(self) -> bytes:
        yanked = f' data-yanked="{self.yanked}"' if self.yanked else ""
        name = f"{PACKAGE.replace('-', '_')}-1.0-py3-none-any.whl"
        return f'<!DOCTYPE html><a href="/files/{name}"{yanked}>{name}</a>'.encode()


def _handler(index: WheelIndex) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"/simple/{PACKAGE}/" and index.has_it:
                self._send(index.page(), "text/html")
            elif self.path.startswith("/files/"):
                index.downloads += 1
                self._send(index.sent or index.wheel, "application/octet-stream")
            else:
                self.send_error(404)

        def _send(self, content: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            is_file = kind == "application/octet-stream"
            if is_file and index.cut_at:
                self.wfile.write(content[: index.cut_at])
                self.close_connection = True
                return
            if is_file and index.is_held:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                index.reached.set()
                index.ended.wait()
                content = content[len(content) // 2 :]
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler
