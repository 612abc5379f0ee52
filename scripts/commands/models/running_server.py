"""Asks the server of these settings, if one runs, which models it serves."""

import json
import urllib.request
from typing import Any, Final

from hearth.shared.processes import url_of
from hearth.shared.settings_from_env import Settings

WAIT_S: Final = 1.0
BYTES_MAX: Final = 4 * 1024**2


def served_names(settings: Settings) -> tuple[str, ...]:
    """Return the names of the models that a running server serves.

    Empty where none runs, or where what listens there is no such server.
    """
    key = settings.api_keys[0] if settings.api_keys else "local"
    request = urllib.request.Request(
        f"{url_of(settings.proxy_host, settings.proxy_port)}/v1/models",
        headers={"authorization": f"Bearer {key}"},
    )
    # No proxy of the environment: it is this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=WAIT_S) as answer:
            told: Any = json.loads(answer.read(BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return ()
    rows = told.get("data") if isinstance(told, dict) else None
    if not isinstance(rows, list):
        return ()
    names = (row.get("id") for row in rows if isinstance(row, dict))
    return tuple(name for name in names if isinstance(name, str))
