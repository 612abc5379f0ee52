"""Counts whose entries are found in the dicts and sets of a server's objects, and by whom.

Every dict, OrderedDict and set that an attribute of an object of ours holds is replaced by one that
remembers who put each key there. A hit is a key that is looked up and found.
"""

import functools
import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_NOBODY = ""


class Spies:
    """The memories of some objects. `who` is who speaks now.

    `hits` has, by (memory, who looked, who had put it there), how often that was found.
    """

    def __init__(self, *roots: Any) -> None:
        self.who = _NOBODY
        self.hits: Counter[tuple[str, str, str]] = Counter()
        self.names: set[str] = set()
        spied: dict[int, tuple[Any, _Spy]] = {}  # two objects may hold the same one
        for holder in list(_objects(roots)):
            for name, value in _attributes(holder):
                if (kind := _KINDS.get(type(value))) is None:
                    continue
                memory = f"{type(holder).__name__}.{name}"
                self.names.add(memory)
                _, spy = spied.setdefault(id(value), (value, kind(self, memory, value)))
                object.__setattr__(holder, name, spy)

    def watching(self, kind: type, writes: Sequence[str], reads: Sequence[str]) -> type:
        """Return a `kind` whose objects remember who wrote to them, by methods of these names.

        A hit is a read of something: a result that is neither None, False nor empty.
        """

        def noting(name: str) -> Any:
            method = getattr(kind, name)

            @functools.wraps(method)
            def wrapped(holder: Any, *args: Any, **more: Any) -> Any:
                writers = holder.__dict__.setdefault("writers_of_spies", [])
                if name in writes and self.who not in writers:
                    writers.append(self.who)
                found = method(holder, *args, **more)
                for writer in writers if name in reads and found else ():
                    self.hits[kind.__name__, self.who, writer] += 1
                return found

            return wrapped

        return type(kind.__name__, (kind,), {name: noting(name) for name in (*writes, *reads)})

    def crossed(self) -> dict[tuple[str, str, str], int]:
        """Return the hits of what somebody else had put there."""
        return {
            row: count
            for row, count in self.hits.items()
            if _NOBODY not in row[1:] and row[1] != row[2]
        }

    def own(self, who: str) -> set[str]:
        """Return the memories in which one has found what one had put there oneself."""
        return {memory for memory, looked, put in self.hits if looked == put == who}


class _Spy:
    """Remembers who put each key of a dict or a set there."""

    _spies: Spies
    _memory: str
    _put_by: dict[Any, str]

    def _note(self, key: Any) -> None:
        self._put_by.setdefault(key, self._spies.who)

    def _look(self, key: Any) -> None:
        if key in self._put_by:
            self._spies.hits[self._memory, self._spies.who, self._put_by[key]] += 1

    def _drop(self, key: Any) -> None:
        self._put_by.pop(key, None)


def _watching(base: type, name: str, *acts: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """Return the method of `base` which first does `acts` with its key."""
    method = getattr(base, name)

    @functools.wraps(method)
    def watched(self: Any, key: Any, *rest: Any) -> Any:
        for act in acts:
            act(self, key)
        return method(self, key, *rest)

    return watched


class _SpiedDict(_Spy, OrderedDict):  # type: ignore[type-arg]  # of whatever it stands for
    def __init__(self, spies: Spies, memory: str, rows: Any) -> None:
        self._spies, self._memory, self._put_by = spies, memory, {}
        super().__init__()
        for key, value in rows.items():
            self[key] = value

    __setitem__ = _watching(OrderedDict, "__setitem__", _Spy._note)
    __delitem__ = _watching(OrderedDict, "__delitem__", _Spy._drop)
    __getitem__ = _watching(OrderedDict, "__getitem__", _Spy._look)
    __contains__ = _watching(OrderedDict, "__contains__", _Spy._look)
    get = _watching(OrderedDict, "get", _Spy._look)
    pop = _watching(OrderedDict, "pop", _Spy._look, _Spy._drop)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the value. That it was there saved nobody anything: the default is made first."""
        if key not in self._put_by:
            self[key] = default
        return super().__getitem__(key)

    def popitem(self, last: bool = True) -> Any:
        row = super().popitem(last)
        self._drop(row[0])
        return row

    def clear(self) -> None:
        super().clear()
        self._put_by.clear()


class _SpiedSet(_Spy, set):  # type: ignore[type-arg]
    def __init__(self, spies: Spies, memory: str, rows: Any) -> None:
        self._spies, self._memory = spies, memory
        self._put_by = dict.fromkeys(rows, spies.who)
        super().__init__(rows)

    add = _watching(set, "add", _Spy._note)
    discard = _watching(set, "discard", _Spy._drop)
    __contains__ = _watching(set, "__contains__", _Spy._look)


_KINDS: dict[type, Any] = {dict: _SpiedDict, OrderedDict: _SpiedDict, set: _SpiedSet}


def _objects(roots: Any) -> Iterator[Any]:
    """Yield the objects of ours that are reached from `roots`, each once."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif (bound := getattr(value, "__self__", None)) is not None:
            waiting.append(bound)
        elif (closure := getattr(value, "__closure__", None)) is not None:
            waiting += [cell.cell_contents for cell in closure if cell != type(cell)()]
        elif type(value).__module__.startswith(("hearth.", "scripts.harness")):
            yield value
            waiting += [each for _, each in _attributes(value)]


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
    rows = {name: getattr(holder, name) for name in slots if hasattr(holder, name)}
    return list((rows | getattr(holder, "__dict__", {})).items())


def cached_functions() -> set[str]:
    """Return the functions of the product, of modules that are imported, that remember results.

    Commands are none of it: another test of this process may have imported them.
    """
    wrappers = [each for each in gc.get_objects() if isinstance(each, functools._lru_cache_wrapper)]
    return {
        f"{each.__module__.removeprefix('hearth.')}.{each.__qualname__}"
        for each in wrappers
        if each.__module__.startswith(("hearth.proxy.", "hearth.worker.", "hearth.shared."))
    }
