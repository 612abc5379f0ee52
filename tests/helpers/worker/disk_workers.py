"""Starts socketless workers one after another over one KV directory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.prompt.prefill_cuts import CutRule, TurnMarks
from scripts.harness.socketless_worker import CHUNK, Machine, loaded, machine
from scripts.harness.store_builders import ROOT

GB = 1 << 30
NO_MARKS = TurnMarks(frozenset(), ())
TEXT = "The harbor lies in the north. Boats come at seven and leave at nine. " * 8


class Workers:
    """One worker after another on one directory."""

    def __init__(self, directory: Path, kind: type[FileStore] = FileStore) -> None:
        self.directory = directory
        self._kind = kind
        self._disk_thread: DiskThread | None = None

    @property
    def file_store(self) -> FileStore:
        assert self._disk_thread is not None
        return self._disk_thread.file_store

    def start(
        self,
        name: str,
        root: PrefixHash = ROOT,
        make: Callable[..., Machine] = machine,
        **rules: Any,
    ) -> Machine:
        self.kill()
        label = CutRule(rules.get("chunk", CHUNK), NO_MARKS).label
        self._disk_thread = DiskThread(self._kind(self.directory, root, GB, 0, rule=label))
        return make(name, disk_thread=self._disk_thread, root=root, **rules)

    def flush(self) -> None:
        assert self._disk_thread is not None
        assert self._disk_thread.flush(20)

    def kill(self) -> None:
        if self._disk_thread is not None:
            self._disk_thread.close()


def prompt(name: str, *said: str) -> list[int]:
    text = "".join(f"<|im_start|>user\n{part}<|im_end|>\n" for part in said)
    return list(loaded(name).tokenizer.encode(text + "<|im_start|>assistant\n"))
