"""Holds what edits of every kind of configuration file share: paths in it, and values at them.

A path is the keys from the top; a last 0 stands for "an element of the list here", which is added
at its front.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

OURS: Final = "hearth"

Keys = tuple[str | int, ...]
Values = dict[str, Any]


class ConfigError(Exception):
    """A configuration file cannot be edited; the text says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of ours in a configuration file, and what was there before it."""

    keys: Keys
    value: Any
    depth: int  # how many of the keys were there before
    before: str | None = None  # the text of the value that it replaced


def entries_of(wanted: Mapping[str, Any], present: Mapping[str, Any]) -> list[Entry]:
    """Return the values that are to be set so that `present` says what `wanted` does.

    Objects are merged, but one under the name OURS is a value of its own. A list of one is an
    element that a list has or gets. What is there already is no entry of ours.
    """
    return list(_entries((), wanted, present))


def _entries(keys: Keys, wanted: Mapping[str, Any], present: Mapping[str, Any]) -> Iterator[Entry]:
    for name, value in wanted.items():
        here: Keys = (*keys, name)
        is_new = name not in present
        there = present.get(name)
        depth = len(keys) if is_new else len(here)
        if isinstance(value, dict) and name != OURS and (is_new or isinstance(there, dict)):
            for entry in _entries(here, value, there or {}):
                yield replace(entry, depth=depth) if is_new else entry
        elif isinstance(value, list) and (is_new or isinstance(there, list)):
            if value[0] not in (there or ()):
                yield Entry((*here, 0), value[0], depth)
        elif is_new or value != there:
            yield Entry(here, value, depth)


def value_at(values: Any, keys: Keys) -> Any:
    """Return the value at `keys`, which end with no 0; None where there is none."""
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return None
        values = values[key]
    return values


def with_entry(values: Values, entry: Entry) -> Values:
    """Return `values` with that of `entry` set."""
    made, keys = copy.deepcopy(values), entry.keys
    place: Any = made
    for number, key in enumerate(keys[:-1], start=1):
        place = place.setdefault(key, [] if keys[number] == 0 else {})
    if keys[-1] == 0:
        place.insert(0, entry.value)
    else:
        place[keys[-1]] = entry.value
    return made


def without(values: Values, keys: Keys, value: Any) -> Values:
    """Return `values` without the `value` at `keys`, which is there."""
    made = copy.deepcopy(values)
    place = value_at(made, keys[:-1])
    if keys[-1] == 0:
        place.remove(value)
    else:
        del place[keys[-1]]
    return made


def has(values: Values, entry: Entry) -> bool:
    """Whether the value of `entry` stands where it was put."""
    place = value_at(values, entry.keys[:-1])
    if entry.keys[-1] == 0:
        return isinstance(place, list) and entry.value in place
    return isinstance(place, dict) and place.get(entry.keys[-1]) == entry.value
