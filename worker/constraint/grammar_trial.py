"""Tries a grammar in a process that can be killed: this module, run as a program.

llguidance limits neither the time of a compilation nor the depth of its recursion. A grammar whose
size or keywords are not plain is compiled here first, under the kernel's limits.
Imports no MLX. No grammar is logged, or passed in an argument of the process.
"""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hearth.shared.errors import Overloaded
from hearth.shared.process_limits import resident_bytes, virtual_bytes
from hearth.worker.constraint.json_schemas import patterns_of

MODULE: Final = "hearth.worker.constraint.grammar_trial"
MEMORY_BYTES_MAX: Final = 128 << 20
WAIT_S_MAX: Final = 30.0  # wall time, for a busy machine; the process limits its own CPU time
STACK_BYTES: Final = 1 << 20  # the worker's thread that compiles afterwards has twice as much
STATES_MAX: Final = 50_000  # states of a lexer; each takes some KB
SILENT: Final = 0  # llguidance's log level; at higher levels it quotes the answer on stderr
LIMITS: Final = LLParserLimits(verbose_errors=False, max_lexer_states=STATES_MAX)

# A grammar within these limits is plain: it compiles in some 0.3 s and 10 MB.
CHARS_MAX: Final = 100_000
RULES_MAX: Final = 1_000
NODES_MAX: Final = 4_000  # nodes of a plain schema's JSON
LEVELS_MAX: Final = 200  # levels of nesting, if each reference contained all others
PROPERTIES_MAX: Final = 200  # properties of one object; each is optional
MERGED_MAX: Final = 4  # schemas that apply beside another: each may double the compiled size
NUMBERS_MAX: Final = 50  # bounds of numbers
NUMBER_MAX: Final = 2**53  # absolute value: a bound of -(2**63) overflows the stack
DIGITS_MAX: Final = 4  # digits of all multipleOf values together; `allOf` may multiply them
PATTERNS_MAX: Final = 50
PATTERN_CHARS_MAX: Final = 500
REPEATS_MAX: Final = 1_000  # repetitions of a part of a pattern
_COMBINED: Final = ("$ref", "anyOf", "oneOf")
_OPTIONS: Final = "x-guidance"
# Keywords that llguidance does not merge:
_NOTES: Final = frozenset(
    ("$defs", "definitions", "$schema", "$comment", "title", "description", "default")
)
_BOUNDS: Final = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_DOCUMENT: Final = re.compile(r"^r\d+: %json (.*)$", re.MULTILINE)
_MARK: Final = re.compile(r"<\[\d+\]>")
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH")  # the only variables that the process gets


class GrammarError(Exception):
    """llguidance refuses a grammar or cannot go on; the text says why and may quote the grammar."""


class GrammarEnded(GrammarError):
    """A grammar passed a limit of time or memory; the text names the limit."""


def is_plain(source: str) -> bool:
    """Return whether a grammar surely compiles fast, with little memory and stack."""
    documents = [json.loads(document) for document in _DOCUMENT.findall(source)]
    levels, counts, references, multiples = 0, Counter[str](), set[str](), set[str]()
    for document in documents:
        document.pop(_OPTIONS, None)  # Hearth's own entry
    todo = [(document, 1) for document in documents]
    while todo:
        node, depth = todo.pop()
        levels, counts["nodes"] = max(levels, depth), counts["nodes"] + 1
        if isinstance(node, dict):
            counts["bounds"] += sum(key in node for key in _BOUNDS)
            multiples.add(str(node.get("multipleOf", "")).replace(".", ""))
            counts["large"] += len(_parts(node.get("properties"))) > PROPERTIES_MAX
            # Schemas that a value has to fit at the same time:
            others = node.keys() - {"allOf", *_COMBINED} - _NOTES
            combined = sum(key in node for key in _COMBINED) + len(_parts(node.get("allOf")))
            counts["merged"] += max(0, combined + bool(others) - 1)
            references.update(str(node[key]) for key in node if key == "$ref")
        if isinstance(node, int | float):
            counts["large"] += not abs(node) <= NUMBER_MAX  # NaN counts as large
        todo += [(part, depth + 1) for part in _parts(node)]
    patterns = [pattern for document in documents for pattern in patterns_of(document)]
    return (
        len(source) <= CHARS_MAX
        and source.count("\n") <= RULES_MAX
        and counts["nodes"] <= NODES_MAX
        and not counts["large"]
        # Merged schemas are written out with their references: a chain may double at each link.
        and counts["merged"] <= (0 if references else MERGED_MAX)
        and counts["bounds"] <= NUMBERS_MAX
        and sum(map(len, multiples)) <= DIGITS_MAX
        and levels * max(1, len(references)) <= LEVELS_MAX
        and len(patterns) <= PATTERNS_MAX
        and all(pattern.repeats < REPEATS_MAX for pattern in patterns)
        and all(len(pattern.pattern) <= PATTERN_CHARS_MAX for pattern in patterns)
    )


def _parts(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def compile_apart(source: str, cpu_s: float) -> tuple[float, int]:
    """Compile a grammar in a process of its own; return its CPU time and its memory in bytes.

    Raises:
        GrammarError: llguidance refuses the grammar.
        GrammarEnded: it takes more than `cpu_s` of CPU time, or too much memory or stack.
        Overloaded: the system starts no process, or has ended it.
    """
    environment = {name: value for name, value in os.environ.items() if name in _ENVIRONMENT}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", MODULE, f"{cpu_s:.3f}", str(MEMORY_BYTES_MAX)],
            input=_MARK.sub("<[1]>", source).encode(),  # the process's tokens are single bytes
            env=environment | {"MALLOC_ARENA_MAX": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic in llguidance quotes the grammar
            timeout=WAIT_S_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_process(type(error).__name__) from error
    if done.returncode == -signal.SIGPROF:
        raise GrammarEnded(f"it takes more than {cpu_s:.2g} s of CPU time")
    if done.returncode in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGALRM):
        raise _no_process("the system has ended it")
    if done.returncode:
        raise GrammarEnded(
            f"it takes more than {MEMORY_BYTES_MAX >> 20} MB of memory, or is nested too deeply"
        )
    figures, _, error_message = done.stdout.decode().partition("\n")
    if error_message:
        raise GrammarError(error_message)
    spent_s, grown = figures.split()
    if int(grown) > MEMORY_BYTES_MAX:
        raise GrammarEnded(f"it takes more than {MEMORY_BYTES_MAX >> 20} MB of memory")
    return float(spent_s), int(grown)


def _no_process(why: str) -> Overloaded:
    return Overloaded(f"No process can be started for the answer's grammar: {why}. Send it again.")


def matcher_of(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar, and compute its first mask. Raises GrammarError."""
    matcher = LLMatcher(tokenizer, source, log_level=SILENT, limits=LIMITS)
    mask_of(matcher)
    return matcher


def mask_of(matcher: LLMatcher) -> bytes:
    """Return the mask of tokens that may come next: one bit per token, lowest first.

    Raises GrammarError.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return mask


# ---------------------------------------------------------------- the meaning of errors


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of an error for the author of the schema. Immutable."""

    cause: str
    remedy: str = ""
    is_limit: bool = False  # the schema is too large to be followed
    is_of_patterns: bool = False  # patterns make the schema too large


_MEANINGS: Final = (  # messages for clients, by patterns of llguidance's texts
    (
        re.compile(r"items; max is|too many items", re.IGNORECASE),
        Meaning(
            "too many items in a row may come or be left out at one place",
            "Have fewer optional properties or alternatives there: make some required, or group "
            "them",
            is_limit=True,
        ),
    ),
    (
        re.compile(r"too many (expressions|states)|LexerTooComplex", re.IGNORECASE),
        Meaning(
            "its patterns are too many or too complex together",
            "Let patterns repeat less",
            is_limit=True,
            is_of_patterns=True,
        ),
    ),
    (
        re.compile(r"fuel|exhausted|CPU time", re.IGNORECASE),
        Meaning(
            "its patterns, texts and numbers are too complex together",
            "Have a smaller multipleOf or range of numbers, or patterns that repeat less",
            is_limit=True,
            is_of_patterns=True,
        ),
    ),
    (
        re.compile(r"too (big|large|complex)", re.IGNORECASE),
        Meaning(
            "it has too many parts",
            "Have fewer properties, alternatives or values to choose from",
            is_limit=True,
        ),
    ),
    (
        re.compile(r"NoExtension"),
        Meaning(
            "no value is allowed: it holds itself without an end, or its parts exclude each other",
            "Let a $ref to itself be optional, or one of several alternatives",
        ),
    ),
)
_ADVICE: Final = re.compile(r"; (consider making your grammar|try avoiding single-byte).*")


def meaning_of(text: str) -> Meaning:
    """Return the meaning of an error's text; the cause of an unknown error is its own text."""
    found = (meaning for words, meaning in _MEANINGS if words.search(text))
    return next(found, Meaning(text))


def explained(error: Exception) -> str:
    """Return the error's meaning, its own text and the remedy, without a full stop at the end."""
    text = error_text(error)
    meaning = meaning_of(text)
    return text if meaning.cause == text else f"{meaning.cause} ({text}). {meaning.remedy}"


def error_text(error: Exception) -> str:
    """Return the text of llguidance's error without its listing of the grammar.

    The advice to authors of grammars is left out, too: a client writes a schema.
    """
    text = str(error).partition("<backtrace>")[0].partition("<non-verbose/>")[0]
    lines = filter(None, map(str.strip, text.splitlines()))
    kept = " ".join(line for line in lines if not re.match(r"\d+ \||\^", line))
    kept = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", kept)
    return _ADVICE.sub("", kept).rstrip(". ")


# ---------------------------------------------------------------- the program


def main() -> None:
    """Compile the grammar on standard input; print CPU time, memory and the error."""
    source, tokenizer, message = sys.stdin.read(), LLTokenizer("byte"), "it cannot be compiled"

    def compile_it() -> None:
        nonlocal message
        try:
            matcher_of(tokenizer, source)
            message = ""
        except GrammarError as error:
            message = str(error)

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold a client's text
    signal.alarm(round(WAIT_S_MAX))  # the worker that waits may have ended
    before = resident_bytes()
    with contextlib.suppress(OSError, ValueError):  # macOS has no such limit: see compile_apart
        limit = virtual_bytes() + int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=compile_it)
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    began = time.process_time()
    thread.start()
    thread.join()
    print(time.process_time() - began, resident_bytes() - before)
    print(message, end="")


if __name__ == "__main__":
    main()
