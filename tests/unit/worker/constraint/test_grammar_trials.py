"""Checks what a client's grammar may cost, what is tried apart, and whose words it holds."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import compiled_grammar, grammar_compiler, grammar_trial
from hearth.worker.constraint.compiled_grammar import TRIALS_MAX
from hearth.worker.constraint.grammar_compiler import IDLE_S, GrammarCompiler
from hearth.worker.constraint.grammar_trial import MODULE, GrammarError, explained, meaning_of
from scripts.harness.constrained_answers import Schemas, constrainer_for, tool, walk
from scripts.harness.model_families import family

pytestmark = pytest.mark.process

WAIT_S_MAX = 60.0
SECRET = "cAnArY-4419"
JSON = Constraints(is_json=True, schema={"const": "x"})
BOMB = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}}
LONG = Constraints(is_json=True, schema=BOMB | {"required": ["a"]})  # takes many seconds


def schema_of(pattern: str) -> Constraints:
    text = {"type": "string", "pattern": pattern}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    return Constraints(is_json=True, schema=schema)


def chain(links: int, **more: Any) -> Constraints:
    """Return a schema whose definitions each hold the next one."""
    parts: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}, **more}
        for n in range(links)
    }
    parts[f"d{links}"] = {"type": "string"}
    return Constraints(is_json=True, schema={"$ref": "#/$defs/d0", "$defs": parts})


def tokens_of(text: str) -> list[int]:
    return list(family("llama3").tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def compiler() -> GrammarCompiler:
    return constrainer_for(family("llama3"))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of programs that are started, with their options, as they are."""
    started, run = list[Any](), subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        started.append((command, options))
        return run(command, **options)

    monkeypatch.setattr(grammar_trial.subprocess, "run", noted)
    return started


# ---------------------------------------------------------------- what is tried apart


def test_schemas_as_they_are_mostly_asked_for_start_no_process(
    compiler: GrammarCompiler, apart: list[Any]
) -> None:
    for seed in range(40):
        schema = Schemas(seed).one()
        with contextlib.suppress(RequestError):
            walk(compiler, Constraints(is_json=True, schema=schema), []).allowed()
        compiler.token_mask(Constraints("required"), [tool("f", schema)], "", 0)
    assert not apart


def test_an_answer_starts_no_process_whatever_was_tried_before(
    compiler: GrammarCompiler, apart: list[Any]
) -> None:
    asked = schema_of("^(.{3}x|.{4}y){0,3000}$")
    answers = [walk(compiler, asked, []) for _ in range(3)]
    assert len(apart) > 0
    tried, before = len(apart), psutil.Process().children(recursive=True)
    for answer in answers:
        assert answer.takes(tokens_of('{"a": "abcx"}'))
    assert len(apart) == tried
    assert set(psutil.Process().children(recursive=True)) <= set(before)


def doubling(levels: int, **beside: Any) -> dict[str, Any]:
    """Return definitions of which each names the next one twice, with `beside` at each name."""
    names: dict[str, Any] = {
        f"d{n}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{n + 1}", **beside} for side in "lr"},
        }
        for n in range(levels)
    }
    return names | {f"d{levels}": {"type": "object"}}


def beside_within(levels: int) -> dict[str, Any]:
    """Return objects that each hold the next one, with choices beside their properties."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        choices = [{"required": ["a"]}, {"required": ["b"]}]
        held = {"a": schema, "b": {"type": "string"}}
        schema = {"type": "object", "properties": held, "anyOf": choices}
    return schema


OPTIONS = {"x-guidance": {"whitespace_flexible": False}}


def bounded(bound: float) -> dict[str, Any]:
    return {"type": "integer", "minimum": bound, "maximum": bound}


# Some kB, at which llguidance goes to the end of the stack, or takes gigabytes or minutes.
LETHAL = {
    "nested by its references": chain(1_000).schema,
    "nested deeper by its references": chain(20_000).schema,
    "merged beside a reference": {"$ref": "#/$defs/d0", "$defs": doubling(25, type="object")},
    "options beside a reference": {"$ref": "#/$defs/d0", "$defs": doubling(25, **OPTIONS)},
    "two chains merged": {
        "allOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/e0"}],
        "$defs": doubling(17)
        | json.loads(json.dumps(doubling(17)).replace('"d', '"e').replace("/d", "/e")),
    },
    "choices beside properties": beside_within(60),
    "a bound that is negated without end": bounded(-(2**63)),
    "a largest bound": bounded(2**63 - 1),
    "a bound that is no integer": bounded(1e300),
}


@pytest.mark.parametrize("name", LETHAL)
def test_a_schema_that_would_end_a_worker_is_tried_apart_and_ends_none(
    compiler: GrammarCompiler, apart: list[Any], name: str
) -> None:
    try:
        compiler.token_mask(Constraints(is_json=True, schema=LETHAL[name]), [], "", 0)
    except RequestError as error:
        assert error.status == 400
    else:
        assert "bound" in name, "it was taken"
    assert apart or "nested" in name
    assert compiler.token_mask(chain(20), [], "", 0) is not None


@pytest.mark.parametrize("is_tool", [True, False])
def test_a_schema_of_many_parts_that_are_not_plain_starts_few_processes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, is_tool: bool
) -> None:
    """Each takes 0.2 s, and the search for what cannot be enforced looks at part after part."""
    tried = list[str]()

    def tell(source: str, cpu_s: float) -> tuple[float, int]:
        tried.append(source)
        return 0.0, 0

    monkeypatch.setattr(compiled_grammar, "compile_apart", tell)
    parts: dict[str, Any] = {f"p{n}": {"type": "integer", "minimum": 2**60} for n in range(200)}
    schema = {"type": "object", "properties": parts | {"z": {"pattern": "(?=x)y"}}}
    asked = Constraints("required") if is_tool else Constraints(is_json=True, schema=schema)
    with pytest.raises(RequestError) as caught:
        compiler.token_mask(asked, [tool("f", schema)] if is_tool else [], "", 0)
    assert caught.value.status == 400
    assert 0 < len(tried) <= TRIALS_MAX


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory so")
def test_a_schema_that_takes_much_memory_is_a_400(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Constraints(is_json=True, schema={"enum": [f"v{n * 7919}" for n in range(30_000)]})
    assert compiler.token_mask(many, [], "", 0) is not None
    monkeypatch.setattr(grammar_trial, "MEMORY_BYTES_MAX", 12 << 20)
    with pytest.raises(RequestError, match="more than 12 MB of memory") as caught:
        compiler.token_mask(many, [], "", 0, "another")
    assert caught.value.status == 400


def test_other_threads_go_on_while_a_grammar_is_compiled_and_followed(
    compiler: GrammarCompiler,
) -> None:
    wide = {f"p{n}": {"type": "string", "maxLength": n} for n in range(2_000)}
    schema = {"type": "object", "properties": wide, "additionalProperties": False}
    compiler.token_mask(JSON, [], "", 0)  # the tokenizer is read
    ticks, is_over = list[float](), threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(time.monotonic())

    other = threading.Thread(target=tick)
    other.start()
    began = time.monotonic()
    started = compiler._ll_tokenizer()
    source = compiler._source(Constraints(is_json=True, schema=schema), [], "", False)
    assert source is not None
    grammar_trial.matcher_of(started, source)
    ended = time.monotonic()
    is_over.set()
    other.join()
    assert sum(began < each < ended for each in ticks) > 5


def test_a_request_reads_no_tokenizer_which_holds_up_every_answer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.load()
    monkeypatch.setattr(grammar_compiler, "LLTokenizer", None)
    assert compiler.token_mask(JSON, [], "", 0) is not None


def test_a_tokenizer_that_cannot_be_read_ends_no_start(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "tokenizer_config", lambda: "{}")
    compiler.load()
    with pytest.raises(RequestError, match="its tokenizer cannot be read"):
        compiler.token_mask(JSON, [], "", 0)


# ---------------------------------------------------------------- amid an answer


def test_a_pattern_that_fails_amid_its_answer_ends_that_answer_with_a_400(
    compiler: GrammarCompiler,
) -> None:
    bomb = walk(compiler, schema_of("^(.{1,30}b){1,30}$"), [])
    healthy = walk(compiler, schema_of("^a*$"), [])
    said, zeros = tokens_of('{"a": "'), mx.zeros((1, 8))
    while not bomb.guide.failure:
        assert len(said) < 10_000, "nothing ends it"
        said += tokens_of("xb" if len(said) % 3 else "b")
        bomb.guide.process(mx.array(said), zeros)
    assert bomb.guide.failure_status == 400
    assert compiler.report()["answers_ended"] == 1
    assert healthy.takes(tokens_of('{"a": "aa"}'))


# ---------------------------------------------------------------- ends


def test_grammars_that_nobody_uses_are_forgotten_but_answers_under_way_go_on(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr(compiler, "clock", lambda: now[0])
    answer = walk(compiler, JSON, [])
    now[0] += IDLE_S + 1
    compiler.end_idle()
    assert compiler.report()["remembered"] == 0
    assert answer.takes(tokens_of('"x"'))
    assert walk(compiler, JSON, []).takes(tokens_of('"x"'))


def no_process(*_: Any, **__: Any) -> None:
    raise BlockingIOError("Resource temporarily unavailable")


def a_killed_one(*_: Any, **__: Any) -> Any:
    return subprocess.CompletedProcess([], -signal.SIGKILL, b"")


@pytest.mark.parametrize(
    ("run", "told"),
    [(no_process, "No process can be started"), (a_killed_one, "the system has ended it")],
)
def test_a_trial_that_the_system_does_not_let_end_is_a_503_that_blames_no_limit(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, run: Any, told: str
) -> None:
    monkeypatch.setattr(grammar_trial.subprocess, "run", run)
    with pytest.raises(RequestError, match=told) as caught:
        compiler.token_mask(LONG, [], "", 0)
    assert caught.value.status == 503 and "CPU" not in str(caught.value)
    assert compiler.token_mask(JSON, [], "", 0) is not None


WORKER = f"""
import threading
from hearth.worker.constraint.grammar_trial import compile_apart
document = '{json.dumps(BOMB | {"required": ["a"]})}'
threading.Thread(target=compile_apart, args=("start: %json " + document, 5.0)).start()
print("begun", flush=True)
"""


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.night)]
)
def test_no_process_outlives_a_worker_that_is_killed(how: signal.Signals) -> None:
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
        deadline = time.monotonic() + WAIT_S_MAX
        while not (theirs := psutil.Process(worker.pid).children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        worker.send_signal(how)
    _, alive = psutil.wait_procs(theirs, WAIT_S_MAX)
    assert not alive


def test_no_module_that_lies_in_the_workers_directory_is_imported(tmp_path: Path) -> None:
    (tmp_path / "llguidance.py").write_text("raise SystemExit(9)\n")
    program = f"from {MODULE} import *\nprint(compile_apart('start: \"a\"', 1.0)[0] > 0)"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


# ---------------------------------------------------------------- whose words


def test_what_was_compiled_for_one_key_is_not_there_for_another(
    compiler: GrammarCompiler, apart: list[Any]
) -> None:
    asked = schema_of("^(.{3}x|.{4}y){0,3000}$")
    tried = list[int]()
    for owner in ("a", "a", "b", "b"):
        compiler.token_mask(asked, [], "", 0, owner)
        tried.append(len(apart))
    once = tried[0]
    assert once and tried == [once, once, 2 * once, 2 * once], "who has it needs no process"
    assert compiler.report()["remembered"] == 2


def test_no_word_of_a_client_and_no_key_is_in_an_argument_or_the_environment(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, apart: list[Any]
) -> None:
    monkeypatch.setenv("PROXY_API_KEY", SECRET)
    schema = {"enum": [SECRET, *range(20_000)]}
    compiler.token_mask(Constraints(is_json=True, schema=schema), [], "", 0)
    assert apart
    for command, options in apart:
        assert SECRET not in " ".join(command) and SECRET not in repr(options["env"])
        assert options["stderr"] == subprocess.DEVNULL
        assert SECRET in options["input"].decode()


def test_what_is_tried_apart_has_no_mlx_and_starts_soon() -> None:
    script = f"import sys, {MODULE}; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", script], text=True).split())
    assert "llguidance" in loaded
    assert not loaded & {"mlx", "mlx.core", "mlx_lm", "numpy", "transformers", "zmq"}


# ---------------------------------------------------------------- what errors mean

SAID = {
    "Parser Error: Current row has 3599 items; max is 2000; consider making your grammar "
    "left-recursive if it's right-recursive": "fewer optional properties",
    "Too many items (limit 50000; try avoiding single-byte/short lexemes)": "optional properties",
    "lexer error: too many expressions constructed": "patterns repeat less",
    "too many states: 50001": "patterns repeat less",
    "fuel exhausted when checking relevance of lexemes (1000000)": "smaller multipleOf",
    "initial lexer configuration (grammar) too big (limit for this grammar: 1)": "fewer properties",
    "a token of it takes more than 0.5 s of CPU time": "patterns that repeat less",
    "schema too large": "fewer properties",
    "NoExtensionBias": "$ref to itself",
}


@pytest.mark.parametrize("said", SAID)
def test_a_limit_is_explained_with_its_remedy_and_its_own_words(said: str) -> None:
    text = explained(GrammarError(said))
    assert SAID[said] in text
    assert said.partition(";")[0].removesuffix(")") in text
    assert "left-recursive" not in text
    assert not text.endswith((".", " "))


def test_only_a_schema_that_is_too_large_passes_a_limit() -> None:
    assert {said for said in SAID if not meaning_of(said).is_limit} == {"NoExtensionBias"}
    assert not meaning_of("token 5 does not satisfy the grammar").is_limit


def test_words_that_say_what_is_wrong_stay_as_they_are() -> None:
    assert explained(GrammarError("Unknown format: colour")) == "Unknown format: colour"
