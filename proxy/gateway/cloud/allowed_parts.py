"""Judges the values of a body by what of them may pass: records, kinds of records, lists, texts.

A rule is called with a value, where it stands, the role of its message, and the list that kinds
are added to which are left out. It returns what passes, a copy where it judges within, and None
where nothing does: the field then goes, and with a needed one the record that holds it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields

Row = dict[str, Any]
Rule = Callable[..., Any]

NESTED_MAX: Final = 5  # lists within lists: an image of a document of a result of a message
_DATED: Final = re.compile(r"_\d{4}(_?\d\d){2}$")  # of a hosted tool's type


def as_it_is(value: Any, *_: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """A record: `names` pass, some by a rule, and without a needed one it is refused.

    It is left out where `unless` says so of it and of its message's role, and where nothing that
    passes is left of a needed field.
    """

    names: frozenset[str]
    rules: Mapping[str, Rule]
    needed: tuple[str, ...]
    unless: Rule | None

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> Row | None:
        row = value if type(value) is dict else fields.record(value, param)
        if self.unless is not None and self.unless(row, role):
            return None
        names = self.names
        kept = {name: inner for name, inner in row.items() if name in names}
        if not self.rules:
            return kept
        role = kept.get("role", role)
        for name, rule in self.rules.items():
            if name not in kept or (inner := kept[name]) is None:
                continue
            kept[name] = rule(inner, f"{param}.{name}" if param else name, role, left_out)
            if kept[name] is None:
                del kept[name]
                if name in self.needed and param:
                    return None
        for name in self.needed:
            if kept.get(name) is None:
                where = f"{param}.{name}" if param else name
                fields.refuse(where, None, "a value, which the API requires")
        return kept


@dataclass(frozen=True, slots=True)
class Kinds:
    """A record whose `type` says which fields it may have.

    One of another kind is left out; it is refused where a user or a tool shows it, or `is_strict`:
    without it the answer would be to another question.
    """

    of: Mapping[str, Fields]
    untyped: str = ""
    is_strict: bool = False

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> Row | None:
        row = value if type(value) is dict else fields.record(value, param)
        kind = row.get("type") or ("message" if "role" in row else self.untyped)
        if type(kind) is str:
            found = self.of.get(kind) or self.of.get(_DATED.sub("", kind))
            if found is not None:
                return found(row, param, role, left_out)
        if self.is_strict or role in ("user", "tool"):
            fields.refuse(f"{param}.type", kind, "for a cloud model " + ", ".join(self.of))
        left_out.append(str(kind))
        return None


@dataclass(frozen=True, slots=True)
class Rows:
    """A list of records. It goes where none of them is left, unless it `may_be_empty`."""

    part: Fields | Kinds
    may_be_empty: bool = False

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> list[Row] | None:
        if param.count("[") > NESTED_MAX:
            fields.refuse(param, value, f"lists nested up to {NESTED_MAX} deep")
        found, judge = [], self.part.__call__
        for index, item in enumerate(fields.rows(value, param)):
            if (kept := judge(item, f"{param}[{index}]", role, left_out)) is not None:
                found.append(kept)
        return found if found or not value or self.may_be_empty else None


@dataclass(frozen=True, slots=True)
class TextOr:
    """A text, or what `rule` judges."""

    rule: Rule
    text: Rule = as_it_is

    def __call__(self, value: Any, param: str, role: Any, left_out: list[str]) -> Any:
        judge = self.text if type(value) is str else self.rule
        return judge(value, param, role, left_out)
