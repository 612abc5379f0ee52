"""`hearth eval` on pocket: good where the cache is right, and it finds KV that is not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hearth.commands.accuracy.question_file import SHIPPED
from hearth.shared.settings_from_env import PROJECT_DIR
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_format import Array, encode, read, write
from hearth.worker.disk.file_names import parse
from tests.helpers.servers.server import WAIT_S_MAX, Server

# Of one trunk of the shipped file: right behind it, and behind a growing history.
QUESTIONS = (0, 5, 13, 16, 18)


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
    lines = SHIPPED.read_text().splitlines(keepends=True)
    file, saved = tmp_path / "questions.jsonl", tmp_path / "saved.json"
    file.write_text("".join(lines[number] for number in QUESTIONS))
    arguments = (str(file), "--grade", "includes")
    with Server(MODEL_PATH="builtin:pocket") as server:
        status, told = asked(server, *arguments, "--save", str(saved))
        cold, first, warm = told["passes"]
        assert (status, told["changed"]) == (0, []), told
        assert cold["right"] >= 4 and first["right"] == warm["right"] == cold["right"]
        assert cold["cached_share"] == 0 and warm["cached_share"] > 0.95
        assert (first["hits"], warm["hits"]) == (4, 5), "the trunk is read once"
        assert [each["logprob"]["difference"] for each in told["compared"]] == [0, 0]
        server.wait_until_idle()
        server.stop()
        assert falsify(Path(server.environment["KV_CACHE_DIR"])) >= 5
        server.start()
        server.wait_until_ready()
        status, told = asked(server, *arguments, "--compare", str(saved))
    cold, first, _ = told["passes"]
    assert status == 1 and len(told["changed"]) >= 3, told
    assert first["sources"].get("ssd") and cold["right"] >= 4
    assert first["right"] < cold["right"]
    (same,) = [each for each in told["compared"] if each["before"] == "saved cold"]
    assert same["changes"] == [], "cold answers read nothing that is kept"
