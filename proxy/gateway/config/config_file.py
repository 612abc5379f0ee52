"""Reads a LiteLLM config.yaml with the files it includes, as LiteLLM does, without LiteLLM.

What LiteLLM would find out after seconds of importing, this finds at the start: each mistake is a
StartError that names the file, the entry and the remedy. Texts of keys are never told.
"""

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from hearth.shared.errors import StartError

log = logging.getLogger(__name__)

FROM_ENVIRONMENT: Final = "os.environ/"
FILES_MAX: Final = 64  # that one config includes
SECTIONS: Final = (
    *("general_settings", "litellm_settings", "router_settings", "environment_variables"),
)


class ConfigFile:
    """The mapping that a LiteLLM config.yaml and what it includes make, its values as written.

    A value that nobody changes. `given` has the variables that os.environ/NAME may name.
    """

    def __init__(self, path: Path, given: Mapping[str, str]) -> None:
        """Raises: StartError: a file cannot be read, or is no config of LiteLLM's."""
        self.path = path
        self.given = given
        self.values = _with_includes(path)
        for name in SECTIONS:
            if not isinstance(self.values.get(name) or {}, dict):
                self.refuse(name, "is no mapping", "Write it as `name: value` lines.")
        models = self.values.get("model_list") or []
        if not isinstance(models, list) or not all(isinstance(row, dict) for row in models):
            self.refuse("model_list", "is no list of mappings", "Begin each entry with a dash.")
        self.models: list[dict[str, Any]] = models

    def section(self, name: str) -> dict[str, Any]:
        return self.values.get(name) or {}

    def resolved(self, value: Any) -> Any:
        """Return what an os.environ/NAME stands for, None where NAME is not set; else `value`."""
        if isinstance(value, str) and value.startswith(FROM_ENVIRONMENT):
            return self.given.get(value.removeprefix(FROM_ENVIRONMENT))
        return value

    def refuse(self, entry: str, what: str, remedy: str) -> NoReturn:
        raise StartError(f"LITELLM_CONFIG {self.path}: {entry} {what}. {remedy}")

    def warn(self, entry: str, what: str) -> None:
        log.warning("LITELLM_CONFIG %s: %s %s.", self.path, entry, what)


def readable_by_others(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _with_includes(path: Path) -> dict[str, Any]:
    """Return the mapping in `path` and in what it includes: lists are appended, others replaced.

    As in LiteLLM: an entry lies beside the file that names it, or else beside `path`; each file
    is read once, the includes of an included file after those of the file that names it.
    """
    merged = _mapping_in(path, "LITELLM_CONFIG")
    seen = {os.path.abspath(path)}
    waiting = [(name, path) for name in _included(merged, path)]
    while waiting:
        name, by = waiting.pop(0)
        beside = os.path.abspath(by.parent / name)
        root = os.path.abspath(path.parent / name)
        found = root if os.path.exists(root) and not os.path.exists(beside) else beside
        if found in seen:
            continue
        seen.add(found)
        if len(seen) > FILES_MAX:
            raise StartError(f"LITELLM_CONFIG {path}: it includes over {FILES_MAX} files.")
        part = _mapping_in(Path(found), f"LITELLM_CONFIG {by}: include")
        waiting += [(below, Path(found)) for below in _included(part, Path(found))]
        for key, value in part.items():
            both = isinstance(value, list) and isinstance(merged.get(key), list)
            merged[key] = [*merged[key], *value] if both else value
    return merged


def _included(values: dict[str, Any], path: Path) -> list[str]:
    """Take the list of included files out of `values`."""
    names = values.pop("include", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise StartError(
            f"LITELLM_CONFIG {path}: include is no list of files. Name each by a dash."
        )
    return names


def _mapping_in(path: Path, named_by: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(
            f"{named_by} names {path}, which cannot be read ({error.strerror}). Name a LiteLLM "
            "config.yaml that you can read."
        ) from None
    except UnicodeDecodeError as error:
        raise StartError(
            f"{named_by} names {path}, which is no UTF-8 (byte {error.start:,}). Save it as UTF-8."
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise StartError(
            f"{named_by} names {path}, which is no YAML{_place(error)}. Correct that line."
        ) from None
    if not isinstance(values, dict):
        raise StartError(
            f"{named_by} names {path}, which holds no mapping. A LiteLLM config.yaml has "
            "`model_list:` and its entries."
        )
    return values


def _place(error: Exception) -> str:
    """Return where YAML breaks; what stands there may be a key, so it is not told."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None)
    if mark is None:
        return ""
    return f" (line {mark.line + 1}, column {mark.column + 1})" if what else ""
