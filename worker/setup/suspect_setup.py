"""Makes what names running forwards, for who survives the worker, and what isolates suspects."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.shared.settings_from_env import Settings
from hearth.shared.suspects.forward_record import ForwardRecord, record_path
from hearth.shared.suspects.suspect_store import open_store
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.requests.suspect_check import SuspectCheck
from hearth.worker.schedule.suspects.running_forwards import RunningForwards
from hearth.worker.schedule.suspects.suspect_isolation import SuspectIsolation

_IPC: Final = "ipc://"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SuspectParts:
    """What the threads of one worker share a store by; each part names its owner."""

    check: SuspectCheck
    forwards: RunningForwards
    isolation: SuspectIsolation


def make_suspect_parts(settings: Settings, endpoint: str, cut_rule: CutRule) -> SuspectParts:
    """Return parts that do nothing where the files cannot be."""
    store = open_store(settings.kv_cache_dir, cut_rule.label)
    record = None
    if store is not None:
        try:
            record = ForwardRecord(record_path(Path(endpoint.removeprefix(_IPC))))
        except OSError as error:
            log.warning("a request that ends this worker will not be known: %s", error)
    return SuspectParts(
        SuspectCheck(store), RunningForwards(record, store), SuspectIsolation(store, cut_rule.chunk)
    )
