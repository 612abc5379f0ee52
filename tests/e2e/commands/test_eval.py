"""`hearth eval`: good where the cache is right, and it finds KV that is not.

The right answers to its questions are what random weights say without a cache.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hearth.shared.paths import PROJECT_DIR
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import Array, encode, parse, read, write
from tests.helpers.servers.counted_talk import ASK, NOTES
from tests.helpers.servers.server import WAIT_S_MAX, Server

pytestmark = pytest.mark.night

QUESTIONS = (ASK, "Who was in the garden?", "What is 3 + 4?", "Why?", "What was said in May?")
TOKENS_MAX = 12
FREE = {"temperature": 0, "max_tokens": TOKENS_MAX, "enable_thinking": False, "use_kv_cache": False}


def write_questions(server: Server, file: Path) -> None:
    """Write questions of one trunk, each behind those before it, with what the server answers."""
    messages = [{"role": "system", "content": NOTES}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = FREE | {"model": "local", "messages": messages}
        told = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S_MAX)
        ideal = told.raise_for_status().json()["choices"][0]["message"]["content"]
        with file.open("a") as lines:
            lines.write(json.dumps({"input": messages, "ideal": ideal}) + "\n")
        messages.append({"role": "assistant", "content": "I do not know."})


def asked(server: Server, *arguments: str) -> tuple[int, Any]:
    """Return the exit status of `hearth eval`, and its JSON."""
    command = [sys.executable, "-m", "hearth.commands.main", "eval", *arguments, "--json"]
    done = subprocess.run(
        [*command, "--base-url", server.url],
        cwd=PROJECT_DIR,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S_MAX,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def falsify(directory: Path) -> int:
    """Give every kept record of rows other values under a right checksum; return how many."""
    count = 0
    for path in directory.rglob("*"):
        name = parse(path.name, "") if path.is_file() else None
        if name is None:
            continue
        root = PrefixHash(bytes.fromhex(path.parent.name))
        record = read(path, root, name, path.stat().st_size)
        arrays = tuple(
            Array(each.name, each.dtype, np.ascontiguousarray(each.values[..., ::-1]))
            for each in record.arrays
        )
        with path.open("r+b", buffering=0) as file:
            write(file.fileno(), encode(replace(record, arrays=arrays)))
        count += 1
    return count


def test_the_cache_changes_no_answer_and_kept_kv_of_other_values_is_found(tmp_path: Path) -> None:
    file, saved = tmp_path / "questions.jsonl", tmp_path / "saved.json"
    arguments = (str(file), "--grade", "includes", "--max-tokens", str(TOKENS_MAX))
    with Server() as server:
        write_questions(server, file)
        status, told = asked(server, *arguments, "--save", str(saved))
        cold, first, warm = told["passes"]
        assert (status, told["changed"]) == (0, []), told
        assert cold["right"] == 5 and first["right"] == warm["right"] == cold["right"]
        assert cold["cached_share"] == 0 and warm["cached_share"] > 0.95
        assert (first["hits"], warm["hits"]) == (4, 5), "the trunk is read once"
        differences = [each["logprob"]["difference"] for each in told["compared"]]
        assert len(differences) == 2 and max(differences) < 0.001
        server.wait_until_idle()
        server.stop()
        assert falsify(Path(server.environment["KV_CACHE_DIR"])) >= 5
        server.start()
        server.wait_until_ready()
        status, told = asked(server, *arguments, "--compare", str(saved))
    cold, first, _ = told["passes"]
    assert status == 1 and len(told["changed"]) >= 3, told
    assert first["sources"].get("ssd") and cold["right"] == 5
    assert first["right"] < cold["right"]
    (same,) = [each for each in told["compared"] if each["before"] == "saved cold"]
    assert same["changes"] == [], "cold answers read nothing that is kept"
