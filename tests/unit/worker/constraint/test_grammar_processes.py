"""The processes that llguidance runs in: their limits, their ends, and whose words they hold."""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil
import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import grammar_client
from hearth.worker.constraint.grammar_client import (
    GrammarLost,
    GrammarProcess,
    GrammarStill,
    Patience,
)
from hearth.worker.constraint.grammar_compiler import IDLE_S, LOOK_S, GrammarCompiler
from hearth.worker.constraint.grammar_protocol import COMPILE_CPU_S, FORK, MEMORY_BYTES_MAX, OK
from scripts.harness.constrained_answers import constrainer_for, walk
from scripts.harness.model_families import family

pytestmark = pytest.mark.process

WAIT_S_MAX = 60.0
SECRET = "cAnArY-4419"
JSON = Constraints(is_json=True, schema={"const": "x"})
MODULE = "hearth.worker.constraint.grammar_process"


def processes() -> set[psutil.Process]:
    """Return all grammar processes of this one."""
    everyone = psutil.Process().children(recursive=True)
    return {each for each in everyone if is_alive(each) and MODULE in each.cmdline()}


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until_gone(gone: set[psutil.Process]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while any(map(is_alive, gone)):
        assert time.monotonic() < deadline, gone
        time.sleep(0.02)


def schema_of(pattern: str) -> Constraints:
    text = {"type": "string", "pattern": pattern}
    schema = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    return Constraints(is_json=True, schema=schema)


@pytest.fixture
def compiler() -> GrammarCompiler:
    return constrainer_for(family("llama3"))


# ---------------------------------------------------------------- limits


BOMB = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}}
LONG = Constraints(is_json=True, schema=BOMB | {"required": ["a"]})  # takes many seconds


def test_a_schema_that_is_compiled_for_long_is_refused_and_the_next_is_served(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(RequestError, match=f"more than {COMPILE_CPU_S:g} s of CPU time") as caught:
        compiler.token_mask(LONG, [], "", 0)
    assert caught.value.status == 400
    assert compiler.report() == {
        "remembered": 0,
        "refused": 1,
        "ended": 1,
        "left_out": 0,
        "answers_ended": 0,
        "call_drafts_ended": 0,
    }
    assert compiler.token_mask(JSON, [], "", 0) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory so")
def test_a_process_that_takes_much_memory_is_ended_alone(compiler: GrammarCompiler) -> None:
    before = processes()
    compiler.token_mask(JSON, [], "", 0)
    (tokenizer, grammar) = sorted(processes() - before, key=lambda each: len(each.parents()))[-2:]
    (base,) = {tokenizer.parent()}
    assert base is not None and base.rlimit(psutil.RLIMIT_AS)[0] == psutil.RLIM_INFINITY
    assert 0 < grammar.rlimit(psutil.RLIMIT_AS)[0] - grammar.memory_info().vms <= MEMORY_BYTES_MAX

    small = grammar.memory_info().vms + (4 << 20)
    tokenizer.rlimit(psutil.RLIMIT_AS, (small, small))
    with pytest.raises(RequestError) as caught:
        compiler.token_mask(LONG, [], "", 0)
    assert caught.value.status == 400
    assert constrainer_for(family("llama3")).token_mask(JSON, [], "", 0) is not None


def test_a_pattern_that_repeats_within_repeats_is_refused_by_its_name(
    compiler: GrammarCompiler,
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.token_mask(schema_of("(.{1,500}a){500}"), [], "", 0)
    said = str(caught.value)
    assert caught.value.status == 400
    assert "'(.{1,500}a){500}' at /properties/a/pattern" in said
    assert "250,000 times" in said and "Let it repeat less" in said


def test_a_pattern_that_fails_amid_its_answer_ends_that_answer_with_a_400(
    compiler: GrammarCompiler,
) -> None:
    bomb = walk(compiler, schema_of("^((a{99}){3}|(b{99}){3})*$"), [])
    healthy = walk(compiler, schema_of("^a*$"), [])
    assert bomb.guide.process(mx.array([0])[:0], mx.zeros((1, 8))).shape == (1, 8)
    bomb.guide.process(mx.array(tokens_of('{"a": "')), mx.zeros((1, 8)))
    end_only_answer(signal.SIGPROF)  # the kernel's, where a step's CPU time is over
    zeros = mx.zeros((1, 8))
    assert bomb.guide.process(mx.array(tokens_of('{"a": "aaa')), zeros) is zeros
    assert (bomb.guide.failure_status, bomb.guide.failure_code) == (400, "constraint_failed")
    assert "more than 0.5 s of CPU time" in bomb.guide.failure
    assert "(a{99}){3}" in bomb.guide.failure and "repeats a part 297 times" in bomb.guide.failure
    assert compiler.report()["answers_ended"] == 1
    assert healthy.takes(tokens_of('{"a": "aa"}'))


def tokens_of(text: str) -> list[int]:
    return list(family("llama3").tokenizer.encode(text, add_special_tokens=False))


def end_only_answer(how: signal.Signals) -> None:
    answer = max(processes(), key=lambda each: len(each.parents()))
    answer.send_signal(how)
    wait_until_gone({answer})


def test_a_grammar_of_900_optional_properties_fails_amid_its_answer_with_a_400(
    compiler: GrammarCompiler,
) -> None:
    """Its code has no SDK send it again, and its text names what is too much, not a pattern."""
    properties = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(900)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    guide = walk(compiler, Constraints(is_json=True, schema=schema), []).guide
    guide.process(mx.array(tokens_of('{"p1')), mx.zeros((1, 8)))
    assert (guide.failure_status, guide.failure_code) == (400, "constraint_failed")
    assert "too many items in a row" in guide.failure
    assert "fewer optional properties" in guide.failure
    assert "{899}" not in guide.failure and "left-recursive" not in guide.failure
    assert not guide.failure.endswith(".")


# ---------------------------------------------------------------- ends


def test_an_answer_that_is_over_leaves_no_process(compiler: GrammarCompiler) -> None:
    compiler.token_mask(JSON, [], "", 0)
    before = processes()
    answer = walk(compiler, JSON, [])
    answer.tokens = tokens_of('"')
    answer.allowed()
    begun = processes() - before
    assert len(begun) == 1
    del answer
    wait_until_gone(begun)


def test_processes_that_nobody_uses_end_but_those_of_answers_under_way(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000.0]
    monkeypatch.setattr(compiler, "clock", lambda: now[0])
    gc.collect()
    before = processes()
    answer = walk(compiler, JSON, [])
    answer.tokens = tokens_of('"')
    answer.allowed()
    used = processes() - before
    now[0] += IDLE_S + 1
    compiler.end_idle()
    assert compiler.compiled_count == 0
    assert all(map(is_alive, used)), "an answer goes on"
    answer.guide.close()
    now[0] += LOOK_S
    compiler.end_idle()
    wait_until_gone(used)
    assert walk(compiler, JSON, []).takes(tokens_of('"x"'))


def test_a_grammar_whose_process_was_killed_is_compiled_anew(compiler: GrammarCompiler) -> None:
    compiler.token_mask(JSON, [], "", 0)
    killed = processes()
    for each in killed:
        each.kill()
    wait_until_gone(killed)
    assert walk(compiler, JSON, []).takes(tokens_of('"x"'))
    assert compiler.hits.total() == 0
    assert compiler.compiled_count == 1


def test_an_answer_whose_grammar_was_killed_ends_with_a_503(compiler: GrammarCompiler) -> None:
    """It is nothing that its client did."""
    answer = walk(compiler, JSON, [])
    for each in processes():
        each.kill()
    zeros = mx.zeros((1, 8))
    assert answer.guide.process(mx.array(tokens_of('"')), zeros) is zeros
    assert (answer.guide.failure_status, answer.guide.failure_code) == (503, "worker_unavailable")
    assert "the system has ended it" in answer.guide.failure


def test_an_answer_whose_own_process_was_killed_is_a_503_that_blames_no_limit(
    compiler: GrammarCompiler,
) -> None:
    answer = walk(compiler, schema_of("^(a{99}){3}$"), [])
    answer.guide.process(mx.array(tokens_of('{"a": "')), mx.zeros((1, 8)))
    end_only_answer(signal.SIGKILL)
    answer.guide.process(mx.array(tokens_of('{"a": "aaa')), mx.zeros((1, 8)))
    assert (answer.guide.failure_status, answer.guide.failure_code) == (503, "worker_unavailable")
    assert "CPU" not in answer.guide.failure and "a{99}" not in answer.guide.failure
    assert not answer.guide.failure.endswith(".")


def test_answers_whose_processes_all_stand_still_cost_little_more_than_one_wait_together(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [walk(compiler, JSON, []) for _ in range(3)]
    for answer in answers:
        answer.guide.process(mx.array(tokens_of('"')), mx.zeros((1, 8)))
    for each in processes():
        each.suspend()
    compiler.patience.first_s = 0.4
    for answer, wait in zip(answers, ("0.4", "0.1", "0.05"), strict=True):
        answer.guide.process(mx.array(tokens_of('"x')), mx.zeros((1, 8)))
        assert answer.guide.failure_status == 503
        assert f"no answer within {wait} s" in answer.guide.failure
    monkeypatch.setattr(grammar_client, "FORK_S_MAX", 1.0)
    other = schema_of("^b$")  # is compiled by processes that are started anew
    assert compiler.token_mask(other, [], "", 0) is not None


class SlowPipe:
    """The connection to a process that answers at a poll of its own, and is no process."""

    closed = False

    def __init__(self, answers_at: int) -> None:
        self.waits: list[float] = []
        self._answers_at = answers_at

    def poll(self, wait_s: float) -> bool:
        self.waits.append(wait_s)
        return len(self.waits) >= self._answers_at

    def send_bytes(self, _: bytes) -> None: ...

    def recv_bytes(self, _: int) -> bytes:
        return OK + b"mask"

    def close(self) -> None: ...


def test_a_machine_that_is_paused_as_a_whole_ends_no_answer() -> None:
    """A pause makes whatever wait it falls into end in vain, however long it takes."""
    paused: Any = SlowPipe(answers_at=2)
    assert GrammarProcess(paused).step([1], 2.0) == b"mask"
    assert paused.waits == [0.1, 0.1]
    still: Any = SlowPipe(answers_at=999)
    with pytest.raises(GrammarStill, match="no answer within 2 s"):
        GrammarProcess(still).step([1], 2.0)
    assert sum(still.waits) == pytest.approx(2.0)
    short: Any = SlowPipe(answers_at=999)
    with pytest.raises(GrammarStill):
        GrammarProcess(short).step([1], 0.05)
    assert short.waits == [0.05]


STALL_S = 0.5  # of a process; its connection waits 0.1 s for the rest of a message


@contextlib.contextmanager
def connected() -> Iterator[tuple[Connection, GrammarProcess]]:
    """Yield a process' end of a connection, and the process as the worker sees it."""
    theirs, ours = socket.socketpair()
    short = struct.pack("@ll", 0, 100_000)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, short)
    process = GrammarProcess(Connection(ours.detach()))
    with Connection(theirs.detach()) as end:
        yield end, process
    process.close()


def test_a_process_that_stalls_before_it_hands_its_fork_over_is_waited_for() -> None:
    """It has told that it forked, and then waits for a page of its code from the disk."""
    with connected() as (end, process), socket.socket(socket.AF_UNIX) as fork:

        def fork_slowly() -> None:
            assert end.recv_bytes() == FORK
            end.send_bytes(OK)
            time.sleep(STALL_S)
            send_handle(end, fork.fileno(), None)

        with ThreadPoolExecutor(1) as pool:
            played = pool.submit(fork_slowly)
            process.fork(2.0).close()
            played.result()
        assert not process.is_ended


def test_a_process_that_tells_of_a_fork_and_gives_none_stands_still() -> None:
    with connected() as (end, process):
        end.send_bytes(OK)
        with pytest.raises(GrammarStill, match=r"no answer within 0\.2 s"):
            process.fork(0.2)
        assert process.is_ended


def test_a_part_of_an_answer_is_no_end_by_the_system() -> None:
    with connected() as (end, process):
        os.write(end.fileno(), struct.pack("!i", 1_000) + OK)
        with pytest.raises(GrammarStill, match="gave no more of one within 2 s"):
            process.step([1])
        assert process.is_ended


def test_a_process_that_takes_but_a_part_of_a_grammar_is_no_end_by_the_system() -> None:
    with connected() as (_, process):
        with pytest.raises(GrammarStill, match="took no more of a message within 10 s"):
            process.compile("x" * (8 << 20))  # more than a socket holds
        assert process.is_ended


def test_the_inference_thread_waits_for_many_that_stand_still_but_a_few_seconds() -> None:
    patience, waits = Patience(), []
    for _ in range(32):
        waits.append(patience.wait_s)
        patience.note_in_vain()
    assert waits[0] == 2.0
    assert sum(waits[:3]) < 3.0
    assert sum(waits) < 5.0


def test_a_request_at_the_moment_when_all_grammar_processes_are_killed_is_served(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has just been killed does not look so yet."""
    compiler.token_mask(JSON, [], "", 0)
    killed = processes()
    for each in killed:
        each.kill()
    unseen = property(lambda self: self._connection.closed)
    monkeypatch.setattr(grammar_client.GrammarProcess, "is_gone", unseen)
    assert compiler.token_mask(schema_of("^c$"), [], "", 0) is not None
    wait_until_gone(killed)


def test_grammars_whose_processes_were_killed_keep_no_connection(
    compiler: GrammarCompiler,
) -> None:
    compiler.token_mask(JSON, [], "", 0)
    gc.collect()  # of earlier tests, what would close its connections amid this one
    files = psutil.Process().num_fds()
    before = processes()
    for n in range(4):
        compiler.token_mask(schema_of(f"^{n}$"), [], "", 0)
    killed = processes() - before
    assert len(killed) == 4
    for each in killed:
        each.kill()
    wait_until_gone(killed)
    compiler.token_mask(JSON, [], "", 0)
    assert compiler.compiled_count == 1
    assert psutil.Process().num_fds() == files


WORKER = """
import time
from hearth.worker.constraint.grammar_client import base_process
line = [base_process()]
for _ in range(3):
    line.append(line[-1].fork())
print("begun", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_worker_that_is_killed(how: signal.Signals) -> None:
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"begun\n"
        theirs = set(psutil.Process(worker.pid).children(recursive=True))
        assert len(theirs) == 4, "base, tokenizer, grammar, answer"
        max(theirs, key=lambda each: each.pid).suspend()  # it would not see that its worker is gone
        worker.send_signal(how)
    wait_until_gone(theirs)


def test_no_module_that_lies_in_the_workers_directory_is_imported(tmp_path: Path) -> None:
    (tmp_path / "llguidance.py").write_text("raise SystemExit(9)\n")
    program = WORKER.replace("time.sleep(600)", "line[0].fork()")
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


# ---------------------------------------------------------------- whose words


def test_what_was_compiled_for_one_key_is_not_there_for_another(compiler: GrammarCompiler) -> None:
    for owner in ("a", "a", "b"):
        compiler.token_mask(JSON, [], "", 0, owner)
    assert compiler.hits == {"a": 1}
    compiler.token_mask(JSON, [], "", 0, "b")
    assert compiler.hits == {"a": 1, "b": 1}
    assert compiler.compiled_count == 2


def test_no_word_of_a_client_and_no_key_is_in_an_argument_or_the_environment(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXY_API_KEY", SECRET)
    grammar_client.end_base()  # the next one starts with what is in the environment now
    walk(compiler, Constraints(is_json=True, schema={"const": SECRET}), [])
    assert len(processes()) == 3
    for each in processes():
        assert SECRET not in " ".join(each.cmdline())
        assert SECRET not in repr(each.environ())


def test_llguidance_is_not_in_the_worker_nor_mlx_in_its_processes() -> None:
    said = subprocess.check_output(
        [
            sys.executable,
            "-c",
            "import sys, hearth.worker.constraint.grammar_compiler\nworker = set(sys.modules)\n"
            f"import {MODULE}\n"
            "print('llguidance' in worker, 'llguidance' in sys.modules)",
        ],
        text=True,
    )
    assert said.split() == ["False", "True"]
    script = f"import sys, {MODULE}; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", script], text=True).split())
    assert not loaded & {"mlx", "mlx.core", "mlx_lm", "numpy", "transformers", "zmq"}


def test_a_system_that_gives_no_process_is_told_as_a_503(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise GrammarLost("Resource temporarily unavailable")

    compiler.token_mask(JSON, [], "", 0)
    monkeypatch.setattr(grammar_client.GrammarProcess, "fork", refuse)
    with pytest.raises(RequestError, match="No process can be started") as caught:
        compiler.token_mask(schema_of("^a$"), [], "", 0)
    assert caught.value.status == 503
