"""Makes journals whose records are plain values, and a source that remembers all of them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hearth.shared.durable_journal import JournalWriter, open_journal_writer

SCHEMA = 2
WAIT_S = 60.0


class Notes:
    """A source whose items are records, and which remembers them all, but for `gone`."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.losses = 0

    def everything(self) -> Iterable[Any]:
        yield from list(self.kept)

    def record(self, item: Any) -> Any:
        return item

    def lost(self) -> None:
        self.losses += 1


def opened(directory: Path, notes: Notes | None = None) -> tuple[JournalWriter[Any], list[Any]]:
    """Return a journal writer, and the records that were there."""
    writer = open_journal_writer(directory, notes or Notes(), SCHEMA)
    assert isinstance(writer, JournalWriter)
    return writer, [record for _, record in writer.read()]


def put(writer: JournalWriter[Any], item: Any, *, renews: bool = False) -> None:
    """Put an item and wait until it is written."""
    writer.put(item, 1, renews=renews)
    assert writer.flush(WAIT_S)


def wrote(directory: Path, *records: Any) -> dict[str, int]:
    """Put `records` behind what is there, and close; return what was counted."""
    writer, _ = opened(directory)
    for record in records:
        writer.put(record, 1)
    writer.close()
    return writer.report()


def held(directory: Path) -> list[Any]:
    writer, records = opened(directory)
    writer.close()
    return records
