"""Settings: environment and `.env` become frozen dataclasses, once, in `load_settings`.

Nothing else reads `os.environ` for a setting. A value that is not allowed refuses to start, and the
message names the variable, the value and what is allowed. `.env.example` lists every variable with
its default; a test keeps it equal to the table in `hearth.shared.settings`.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from dotenv import dotenv_values

from hearth.shared.dropped_settings import (
    FORMER_DEFAULTS,
    REFUSED,
    former_model_warnings,
    warnings_of,
    without_former_model,
)
from hearth.shared.errors import StartError
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import Settings, public_name

__all__ = [
    "PROJECT_DIR",
    "Settings",
    "example_lines",
    "load_settings",
    "public_name",
    "setting_warnings",
    "variables_in",
]

UNIFORM_BITS: Final = (0, 4, 8)  # 0 = off


def load_settings(environ: Mapping[str, str], env_file: Path | None) -> Settings:
    """Return the settings of `env_file` (if it exists), overridden by `environ`.

    Raises:
        StartError: a value is not allowed, or values do not go together.
    """
    from_file = variables_in(env_file)
    given = {**from_file, **environ}
    for name, reason in REFUSED.items():
        if given.get(name, "").lower() not in ("", "false", "0", "no", "off"):
            raise StartError(f"{name} is refused: {reason}.")
    values = {}
    for row in dataclasses.fields(Settings):
        about = row.metadata
        text = given.get(about["name"], about["default"]).strip()
        text = without_former_model(about["name"], text)
        try:
            values[row.name] = about["parse"](text)
        except ValueError as error:
            raise StartError(f"{about['name']} is {text!r}; allowed is {error}.") from None
    settings = Settings(**values)
    _check_together(settings)
    # With a LiteLLM config the keys may be LiteLLM's: proxy/gateway looks there.
    if not settings.is_loopback and not settings.api_keys and settings.litellm_config is None:
        raise StartError(
            f"PROXY_HOST is {settings.proxy_host}, which others can reach, and PROXY_API_KEY is "
            "empty. Set PROXY_API_KEY, or PROXY_HOST=127.0.0.1."
        )
    return settings


def setting_warnings(
    environ: Mapping[str, str], env_file: Path | None, read: Collection[str] = ()
) -> list[str]:
    """Return a warning for each variable that is set and not read, or names a model that is gone.

    `read` are names in the file that something else reads. A dropped setting that the file has at
    its former default is passed over.
    """
    from_file = variables_in(env_file)
    in_file = [
        name
        for name, text in from_file.items()
        if name not in read and text != FORMER_DEFAULTS.get(name)
    ]
    gone = former_model_warnings({**from_file, **environ})
    return [*gone, *warnings_of(environ, in_file)]


def variables_in(env_file: Path | None) -> dict[str, str]:
    """Return what the file sets, "" where it only names a variable; {} where there is no file.

    Raises:
        StartError: there is one, and it cannot be read. Without it the server would start with
            other settings than its user wrote, and without the keys.
    """
    if env_file is None or not os.path.lexists(env_file):
        return {}
    try:
        with env_file.open(encoding="utf-8") as file:
            values = dotenv_values(stream=file)
    except OSError as error:
        raise StartError(
            f"The settings file {env_file} cannot be read ({error.strerror}). Make it a file that "
            "you can read, or remove it."
        ) from None
    except UnicodeDecodeError as error:
        raise StartError(
            f"The settings file {env_file} is no UTF-8 (byte {error.start:,}). Save it as UTF-8."
        ) from None
    return {name: text or "" for name, text in values.items()}


def _check_together(settings: Settings) -> None:
    """Raise StartError where two settings exclude each other."""
    if not settings.workers and not settings.worker_endpoints:
        raise StartError("WORKERS is 0 and WORKER_ENDPOINTS is empty. Set one of them.")
    if settings.ranks > 1 and settings.rank_hosts is not None and settings.workers > 1:
        raise StartError(
            f"WORKERS is {settings.workers} and RANK_HOSTS names machines, whose ranks serve one "
            "worker. Set WORKERS=1."
        )
    if settings.cache_exact == "true" and settings.cache_store_bits:
        raise StartError(
            f"CACHE_EXACT is true and CACHE_STORE_BITS is {settings.cache_store_bits:g}: KV that "
            "was stored quantised is not exact. Set CACHE_STORE_BITS=off, or CACHE_EXACT=false."
        )
    # What KV_QUANT_SCHEME packs is what CACHE_STORE_BITS says.
    bits, scheme = settings.cache_store_bits, settings.kv_quant_scheme
    if scheme == "uniform" and bits not in UNIFORM_BITS:
        raise StartError(
            f"CACHE_STORE_BITS is {bits:g} and KV_QUANT_SCHEME is uniform, which packs in 4 or 8 "
            "bits. Set CACHE_STORE_BITS=4, or KV_QUANT_SCHEME=turboquant."
        )
    if scheme == "turboquant" and not bits:
        raise StartError(
            "KV_QUANT_SCHEME is turboquant and CACHE_STORE_BITS is off, so that nothing would be "
            "packed by it: live caches (KV_BITS) are packed uniformly. Set CACHE_STORE_BITS=4, or "
            "KV_QUANT_SCHEME=uniform."
        )


def example_lines() -> list[str]:
    """Return what `.env.example` holds: each variable's line of explanation, then its default."""
    lines = []
    for row in dataclasses.fields(Settings):
        lines += [f"# {row.metadata['about']}", f"{row.metadata['name']}={row.metadata['default']}"]
    return lines
