"""Reads a LiteLLM config.yaml with the files it includes, as LiteLLM does, without LiteLLM.

What LiteLLM would find out after seconds of importing, this finds at the start: each mistake is a
StartError that names the file, the entry and the remedy. Texts of keys are never told.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml

from hearth.shared.errors import StartError

log = logging.getLogger(__name__)

FROM_ENVIRONMENT: Final = "os.environ/"
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
            self.section(name)
        rows = enumerate(self.rows("model_list", self.values.get("model_list")), 1)
        self.models = [self.mapping(f"model_list entry {number}", row) for number, row in rows]

    def section(self, name: str) -> dict[str, Any]:
        return self.mapping(name, self.values.get(name))

    def mapping(self, entry: str, value: Any) -> dict[str, Any]:
        """Return `value`, or an empty mapping of nothing. Raises: StartError."""
        if not isinstance(value or {}, dict):
            self.refuse(entry, "is no mapping", "Write it as `name: value` lines.")
        return value or {}

    def rows(self, entry: str, value: Any) -> list[Any]:
        """Return `value`, or an empty list of nothing. Raises: StartError."""
        if not isinstance(value or [], list):
            self.refuse(entry, "is no list", "Begin each entry with a dash.")
        return value or []

    def resolved(self, value: Any) -> Any:
        """Return what an os.environ/NAME stands for, None where NAME is not set; else `value`."""
        name = variable_of(value)
        return self.given.get(name) if name else value

    def refuse(self, entry: str, what: str, remedy: str) -> NoReturn:
        raise StartError(f"LITELLM_CONFIG {self.path}: {entry} {what}. {remedy}")

    def warn(self, entry: str, what: str) -> None:
        log.warning("LITELLM_CONFIG %s: %s %s.", self.path, entry, what)


def variable_of(value: Any) -> str:
    """Return the variable that `value` names as os.environ/NAME; else ""."""
    is_name = isinstance(value, str) and value.startswith(FROM_ENVIRONMENT)
    return value.removeprefix(FROM_ENVIRONMENT) if is_name else ""


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each single value with the name that it, or the list around it, stands under."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, name)
    else:
        yield name, value


def _with_includes(path: Path) -> dict[str, Any]:
    """Return the mapping in `path` and in what it includes: lists are appended, others replaced.

    As in LiteLLM: an entry lies beside the file that names it, or else beside `path`; each file
    is read once, the includes of an included file after those of the file that names it.
    """
    merged: dict[str, Any] = {}
    seen: set[str] = set()
    waiting = [(path.name, path, "LITELLM_CONFIG")]
    while waiting:
        name, by, named_by = waiting.pop(0)
        beside, root = (os.path.abspath(each.parent / name) for each in (by, path))
        found = root if os.path.exists(root) and not os.path.exists(beside) else beside
        if found in seen:
            continue
        seen.add(found)
        part = _mapping_in(Path(found), named_by)
        names = part.pop("include", [])
        if not isinstance(names, list) or not all(isinstance(below, str) for below in names):
            raise StartError(
                f"LITELLM_CONFIG {found}: include is no list of files. Name each by a dash."
            )
        waiting += [(below, Path(found), f"LITELLM_CONFIG {found}: include") for below in names]
        for key, value in part.items():
            both = isinstance(value, list) and isinstance(merged.get(key), list)
            merged[key] = [*merged[key], *value] if both else value
    return merged


def _mapping_in(path: Path, named_by: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise StartError(
            f"{named_by} names {path}, which cannot be read ({error.strerror}). Name a LiteLLM "
            "config.yaml that you can read."
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)  # what stands there may be a key
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise StartError(
            f"{named_by} names {path}, which is no YAML in UTF-8{place}. Correct that line."
        ) from None
    if not isinstance(values, dict):
        raise StartError(
            f"{named_by} names {path}, which holds no mapping. A LiteLLM config.yaml has "
            "`model_list:` and its entries."
        )
    return values
