"""Style that a machine can hold, so that review need not: layers, sizes, comments."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 7

# Path prefix -> what it must not import. In the worker `main` wires the rooms, `loop` and
# `scheduler` use them, and the rooms do not know those above them.
ABOVE = (
    *(
        "hearth.worker.main",
        "hearth.worker.threads.inference_thread",
        "hearth.worker.threads.wire_thread",
        "hearth.worker.schedule.scheduler",
        "hearth.worker.schedule.scheduler_config",
        "hearth.worker.schedule.kv_manager_interface",
        "hearth.worker.requests",
        "hearth.worker.threads.prompt_thread",
    ),
    *("hearth.worker.setup.kv_setup", "hearth.worker.cache_report"),
)
FORBIDDEN = {
    "shared/": ("proxy", "worker"),
    "proxy/": ("worker",),
    "worker/": ("proxy",),
    "worker/prompt/": (
        *ABOVE,
        "hearth.worker.engine",
        "hearth.worker.stream",
        "hearth.worker.schedule.request_state",
        "mlx",
        "mlx_lm",
    ),
    "worker/engine/": (
        *ABOVE,
        "hearth.worker.prompt",
        "hearth.worker.stream",
        "hearth.worker.schedule.request_state",
    ),
    "worker/stream/": (
        *ABOVE,
        "hearth.worker.prompt",
        "hearth.worker.engine",
        "hearth.worker.constraint",
        "hearth.worker.schedule.request_state",
    ),
    "worker/constraint/": (
        *ABOVE,
        "hearth.worker.prompt",
        "hearth.worker.engine",
        "hearth.worker.schedule.request_state",
        "mlx_lm",
    ),
    "worker/cache/": (
        *ABOVE,
        "hearth.worker.kv",
        "hearth.worker.engine",
        "hearth.worker.prompt",
        "hearth.worker.schedule.request_state",
        "mlx",
    ),
    "worker/kv/": (
        *ABOVE,
        "hearth.worker.engine",
        "hearth.worker.prompt",
        "hearth.worker.stream",
        "hearth.worker.schedule.request_state",
    ),
    "worker/disk/": (
        *ABOVE,
        "hearth.worker.kv",
        "hearth.worker.engine",
        "hearth.worker.schedule.request_state",
        "mlx",
    ),
    "worker/threads/wire_thread.py": ("mlx", "mlx_lm", "hearth.worker.engine"),
}
# Third-party module -> the only places that may import it.
ONLY_IN = {
    "zmq": ("shared/zmq_transport.py",),
    "litellm": ("proxy/gateway/litellm_app.py", "proxy/gateway/litellm_handlers.py"),
    "mlx": (
        "worker/engine/",
        "worker/constraint/token_mask.py",
        "worker/stream/logprobs.py",
        "worker/threads/inference_thread.py",
        "worker/kv/",
        "worker/setup/kv_setup.py",
    ),
    "mlx_vlm": ("worker/engine/vlm_loader.py", "worker/prompt/images/image_processor.py"),
    "dotenv": ("shared/load_settings.py",),
}
HISTORY = re.compile(r"#.*\b(previously|used to|no longer|round[- ]?\d|PR ?#?\d)\b", re.I)


def sources(*packages: str) -> Iterator[tuple[str, str, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            yield path.relative_to(ROOT).as_posix(), text, ast.parse(text)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "absolute imports only: they can be searched for"
            yield node.module or ""


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


def test_the_rooms_import_only_what_is_below_them() -> None:
    errors = []
    for path, _, tree in sources("shared", "proxy", "worker"):
        for module in imported(tree):
            for prefix, names in FORBIDDEN.items():
                if path.startswith(prefix) and any(within(module, name) for name in names):
                    errors.append(f"{path}: must not import {module}")
            for name, homes in ONLY_IN.items():
                if within(module, name) and not path.startswith(homes):
                    errors.append(f"{path}: {name} is imported only in {', '.join(homes)}")
    assert not errors, "\n".join(errors)


def test_files_and_functions_stay_small_and_comments_tell_no_history() -> None:
    errors = []
    for path, text, tree in sources("shared", "proxy", "worker", "scripts", "tests"):
        lines = text.splitlines()
        if len(lines) > FILE_LINES_MAX:
            errors.append(f"{path}: {len(lines)} lines, limit {FILE_LINES_MAX}")
        for number, line in enumerate(lines, start=1):
            if HISTORY.search(line) and path != "tests/test_tidy.py":
                errors.append(f"{path}:{number}: comments say why it is so; git says how it was")
        errors += sizes(path, tree)
    assert not errors, "\n".join(errors)


def sizes(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            count = len(node.args.args) + len(node.args.kwonlyargs)
            if length > FUNCTION_LINES_MAX:
                yield f"{path}:{node.lineno}: {node.name} is {length} lines"
            if count > PARAMETERS_MAX:
                yield f"{path}:{node.lineno}: {node.name} takes {count} parameters"


def test_nothing_is_caught_without_a_name() -> None:
    bare = [
        f"{path}:{node.lineno}"
        for path, _, tree in sources("shared", "proxy", "worker", "scripts")
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare, bare


def test_the_environment_is_read_for_settings_in_one_place_only() -> None:
    """Others may hand `os.environ` on whole (to load_settings, to a child), not read from it."""
    reads = re.compile(r"os\.(getenv|environ\.get|environ\[)")
    found = [
        path
        for path, text, _ in sources("shared", "worker")
        for line in text.splitlines()
        if reads.search(line)
    ]
    assert not found, found
