"""Holds what models of many families write, how it is read, and their tokenizers and templates.

A family is a JSON file in tests/data/families, with a template beside it where that is one of our
own with the makers' marks; else `template` names the makers', which real_templates.py fetches.
Calls that many cases share have their names in family_calls.json.
"""

import json
import tempfile
from collections import namedtuple
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from scripts.harness.constrained_answers import tool
from scripts.harness.model_families import Family
from tests.helpers.families.real_templates import real_template

DATA: Final = Path(__file__).parents[2] / "data"
FAMILIES: Final = DATA / "families"
CALLS: Final = json.loads((DATA / "family_calls.json").read_text(), parse_float=Decimal)
WEATHER: Final = {"city": "Oslo", "days": 3}
TEXT: Final = {"type": "string"}
INTEGER: Final = {"type": "integer"}
EDITED: Final = ("path", "old_string", "new_string")
TOOLS: Final[list[dict[str, Any]]] = [
    tool(name, {"type": "object", "properties": properties, **more})
    for name, properties, more in (
        ("get_weather", {"city": TEXT, "days": INTEGER}, {"required": ["city"]}),
        ("edit", dict.fromkeys(EDITED, TEXT), {"required": list(EDITED)}),
        ("now", {}, {}),
        (
            "set",
            {
                **{"flags": {"type": "object"}, "items": {"type": "array", "items": INTEGER}},
                **{"ok": {"type": "boolean"}, "note": TEXT, "ratio": {"type": "number"}},
            },
            {},
        ),
    )
]

# What a model writes behind its generation prompt, and how that is read. Blanks at the ends of
# content and reasoning do not matter; None is any without the family's marks. `calls` are names
# and arguments, or a name in CALLS: beside those they are `among` may stand others, say a malformed
# one, and where they are `soft` they may be missing. `end` is the token behind the text, or answer
# or call, where it is not what such a turn ends with.
Case = namedtuple(
    "Case", "text calls content reasoning end among soft", defaults=([], "", "", "", False, False)
)


@dataclass(frozen=True)
class WrittenFamily(Family):
    """A family of models, as its file has it."""

    about: str = ""  # whose form it is
    makers: str = ""  # the file of their template; "" = one of our own
    config: dict[str, Any] = field(default_factory=dict)  # more of tokenizer_config.json
    think: bool | None = None  # what a client says who wants thinking
    history: tuple[str, ...] = ()  # what a prompt has in this order of a past call and its result
    forced: str = ""  # what a forced call begins with
    forced_texts: tuple[str, ...] = ()  # whole forced calls, beside the case `call`
    cases: dict[str, Case] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """Return the template. Raises FetchError where that is the makers' and not to be had."""
        own = FAMILIES / f"{self.name}.jinja"
        return (
            real_template(self.makers) if self.makers else own.read_text() if own.exists() else ""
        )

    @cached_property
    def tokenizer(self) -> Any:
        """Return mlx-lm's TokenizerWrapper; its files are not kept."""
        with tempfile.TemporaryDirectory() as scratch:
            self.write_tokenizer(Path(scratch), **self.config)
            return self.load(Path(scratch))

    def end_after(self, case: Case) -> str:
        """Return the token that the model writes behind a case."""
        end = case.end or ("call" if case.calls else "answer")
        return {"answer": self.answer_end, "call": self.call_end}.get(end, end)


def written_family(name: str) -> WrittenFamily:
    """Return a family; its numbers are as they are written."""
    row = json.loads((FAMILIES / f"{name}.json").read_text(), parse_float=Decimal)
    cases = {
        key: Case(
            **values | {"calls": CALLS.get(str(values.get("calls")), values.get("calls", []))}
        )
        for key, values in row.pop("cases").items()
    }
    return WrittenFamily(name, str, **({"marks": ()} | row), cases=cases)


def family_names(is_real: bool) -> list[str]:
    """Return the families with the makers' template, or those with one of our own."""
    names = sorted(path.stem for path in FAMILIES.glob("*.json"))
    return [name for name in names if bool(written_family(name).makers) == is_real]
