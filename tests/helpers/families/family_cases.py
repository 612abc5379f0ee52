"""Holds what models of many families write, how it is read, and their tokenizers and templates.

A family is tests/data/families/NAME.json, with NAME.jinja where the template is one of our own in
the makers' words; else `template` names the makers' in tests/helpers/families/real_templates.py.
Its tokenizer is the fixtures' byte-level BPE with the family's marks as added tokens.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from mlx_lm.tokenizer_utils import load as load_from_disk
from tokenizers import AddedToken, Tokenizer

from scripts.fixtures import checkpoint_files
from scripts.harness.constrained_answers import tool
from scripts.harness.model_families import trained_tokenizer
from tests.helpers.families.real_templates import real_template

DATA: Final = Path(__file__).parents[2] / "data"
FAMILIES: Final = DATA / "families"
CALLS: Final = json.loads((DATA / "family_calls.json").read_text(), parse_float=Decimal)
WEATHER: Final = {"city": "Oslo", "days": 3}
TEXT: Final = {"type": "string"}
INTEGER: Final = {"type": "integer"}


def _tool(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return tool(name, schema | ({"required": list(required)} if required else {}))


TOOLS: Final = (
    _tool("get_weather", {"city": TEXT, "days": INTEGER}, "city"),
    _tool("edit", dict.fromkeys(EDITED := ("path", "old_string", "new_string"), TEXT), *EDITED),
    _tool("now", {}),
    _tool(
        "set",
        {
            **{"flags": {"type": "object"}, "items": {"type": "array", "items": INTEGER}},
            **{"ok": {"type": "boolean"}, "note": TEXT, "ratio": {"type": "number"}},
        },
    ),
)


@dataclass(frozen=True)
class Case:
    """What a model writes behind its generation prompt, and how that is read.

    Blanks at the ends of content and reasoning do not matter; None is any without the family's
    marks. In what is read may stand other calls, say a malformed one, where the right ones are
    `among` them; where they are `soft` they may be missing too.
    """

    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)  # name, arguments
    content: str | None = ""
    reasoning: str | None = ""
    end: str = ""  # the token behind it, or answer or call; "" = what such a turn ends with
    among: bool = False
    soft: bool = False


@dataclass(frozen=True)
class WrittenFamily:
    """One family, as its file has it."""

    name: str
    controls: tuple[str, ...]  # special tokens
    ends: tuple[str, ...]  # all that the model's generation config lists
    eos: str
    answer_end: str
    call_end: str
    cases: Mapping[str, Case]
    marks: tuple[str, ...] = ()  # added tokens that are ordinary text
    bos: str | None = None
    about: str = ""  # whose form it is
    template: str = ""  # the makers' file; "" = one of our own
    edits: tuple[tuple[str, str], ...] = ()  # of the makers' template, where it fails as it is
    config: Mapping[str, Any] = field(default_factory=dict)  # more of tokenizer_config.json
    think: bool | None = None  # what a client says who wants thinking
    history: tuple[str, ...] = ()  # what a prompt has in this order of a past call and its result
    forced: str = ""  # what a forced call begins with
    forced_texts: tuple[str, ...] = ()  # whole forced calls, beside the case `call`

    @cached_property
    def source(self) -> str:
        """Return the template. Raises FetchError where that is the makers' and not to be had."""
        own = FAMILIES / f"{self.name}.jinja"
        if not self.template:
            return own.read_text() if own.exists() else ""
        text = real_template(self.template)
        for old, new in self.edits:
            assert old in text, f"{self.template} has no {old} any more"
            text = text.replace(old, new)
        return text

    @cached_property
    def tokenizer(self) -> Any:
        """Return mlx-lm's TokenizerWrapper."""
        with tempfile.TemporaryDirectory() as scratch:
            self.write_tokenizer(Path(scratch))
            ids = checkpoint_files.added_token_ids(Path(scratch) / "tokenizer.json")
            return load_from_disk(Path(scratch), eos_token_ids=[ids[end] for end in self.ends])

    def write_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer's files, the template among them."""
        tokenizer = Tokenizer.from_file(str(trained_tokenizer()))
        special = [AddedToken(text, special=True, normalized=False) for text in self.controls]
        plain = [AddedToken(text, special=False, normalized=False) for text in self.marks]
        tokenizer.add_tokens(special + plain)
        tokenizer.save(str(directory / "tokenizer.json"))
        names = {"eos_token": self.eos, "pad_token": self.controls[0], "bos_token": self.bos}
        checkpoint_files.write_tokenizer_config(directory, self.source, names | dict(self.config))

    def end_of(self, case: Case) -> str:
        """Return the token that the model writes behind a case."""
        named = {"answer": self.answer_end, "call": self.call_end}
        end = case.end or ("call" if case.calls else "answer")
        return named.get(end, end)


def written_family(name: str) -> WrittenFamily:
    """Return a family; its numbers are as they are written."""
    row = json.loads((FAMILIES / f"{name}.json").read_text(), parse_float=Decimal)
    cases = {case: Case(**(values | _calls(values))) for case, values in row["cases"].items()}
    return WrittenFamily(name, **(row | {"cases": cases}))


def family_names(is_real: bool) -> list[str]:
    """Return the families with the makers' template, or those with one of our own."""
    names = sorted(path.stem for path in FAMILIES.glob("*.json"))
    return [name for name in names if bool(written_family(name).template) == is_real]


def _calls(values: dict[str, Any]) -> dict[str, Any]:
    calls = values.get("calls", [])
    return {"calls": CALLS[calls] if isinstance(calls, str) else calls}
