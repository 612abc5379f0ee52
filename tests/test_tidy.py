"""Holds the style that a machine can hold, so that review need not: layers, sentences, names."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGE: Final = ("shared", "proxy", "worker")  # the tops of `hearth` but its commands
TOPS: Final = (*PACKAGE, "scripts", "tests")

# ---------------------------------------------------------------- layers

# The rooms of each top, from the lowest to the highest: one imports only those before it. A folder
# in a room belongs to it.
ORDER: Final = (
    ("shared", "shared/models"),
    (
        *("proxy/http", "proxy/images", "proxy/request", "proxy/documents"),
        *("proxy/pool", "proxy/api", "proxy/workers", "proxy/monitoring", "proxy/gateway"),
        *("proxy/embeddings", "proxy/chat_page", "proxy"),
    ),
    (
        *("worker/cache", "worker/disk", "worker/kv", "worker/draft"),
        "worker/stream",
        *(
            "worker/constraint",
            "worker/formats",
            "worker/engine",
            "worker/prompt",
            "worker/sessions",
        ),
        *("worker/schedule", "worker/doctor", "worker/threads"),
        *("worker/embeddings", "worker/setup", "worker/ranks", "worker"),
    ),
)
# Rooms that stand side by side, or a library that a room does without: place -> what it must not
# import although it is lower.
APART: Final = {
    "shared/": ("hearth.proxy", "hearth.worker", "hearth.commands"),
    "proxy/": ("hearth.worker", "hearth.commands"),
    "worker/": ("hearth.proxy", "hearth.commands"),
    "worker/cache/": ("mlx", "mlx_lm"),
    "worker/disk/": ("mlx", "mlx_lm"),
    "worker/draft/": ("mlx", "mlx_lm", "hearth.worker.disk", "hearth.worker.kv"),
    "worker/engine/": ("hearth.worker.disk", "hearth.worker.kv", "hearth.worker.stream"),
    "worker/prompt/": (
        *("hearth.worker.disk", "hearth.worker.kv", "hearth.worker.stream"),
        *("hearth.worker.engine", "hearth.worker.constraint", "mlx", "mlx_lm"),
    ),
    "worker/sessions/": ("hearth.worker.engine", "hearth.worker.kv", "mlx", "mlx_lm"),
    "worker/stream/": ("hearth.worker.disk", "hearth.worker.kv"),
    "worker/constraint/": ("hearth.worker.disk", "hearth.worker.kv", "mlx_lm"),
    "worker/threads/wire_thread.py": ("mlx", "mlx_lm", "hearth.worker.engine"),
    "scripts/": ("tests",),
}
# Third-party module -> the only places that may import it.
ONLY_IN: Final = {
    "zmq": ("shared/zmq_transport.py", "shared/zmq_rank_port.py"),
    "litellm": ("proxy/gateway/",),
    "mlx": (
        *("worker/engine/", "worker/kv/", "worker/doctor/", "worker/setup/kv_setup.py"),
        "worker/memory_verdict.py",
        *("worker/constraint/token_mask.py", "worker/stream/logprobs.py"),
        *("worker/threads/inference_thread.py", "worker/embeddings/", "worker/ranks/"),
    ),
    "mlx_vlm": (
        *("worker/engine/vision/vlm_loader.py", "worker/prompt/images/image_processor.py"),
        "worker/engine/model_library.py",
        *("worker/kv/quantise_kv.py", "worker/engine/decode/draft_model_loader.py"),
        "worker/engine/cut_repairs.py",
        "worker/embeddings/",
    ),
    "pypdf": ("proxy/documents/pdf_process.py",),
    "dotenv": ("shared/settings.py",),
}
HISTORY: Final = re.compile(r"#.*\b(previously|used to|no longer|round[- ]?\d|PR ?#?\d)\b", re.I)
# Test files that may read private names of ours: each holds a class to how it is made today.
PRIVATE_READERS_MAX: Final = 29
UPSTREAM_NAMES: Final = {
    "_compile_jinja_template": "transformers: compiles each chat template, once",
    "_exit": "os: ends a process whose threads may not outlive the interpreter",
    "_idx": "mlx-lm: where a rotating cache writes next",
    "_position_ids": "mlx-vlm: what a model remembers of its last prompt",
    "_replace": "namedtuple: a copy with other values, so named as to be no field",
    "_rope_deltas": "mlx-vlm: what a model remembers of its last prompt",
    "_server": "aiohttp: the asyncio server of a TCPSite, which alone knows its port",
    "_tokenizer": "mlx-lm: the tokenizer that its wrapper holds",
}
PRIVATE: Final = re.compile(r"(.*\.)?(_[a-z]\w*)")
BY_NAME: Final = ("setattr", "delattr", "getattr", "object", "patch")  # calls that take a name
RIDDLE: Final = re.compile(r"(Do|Does|Is|Are|What|Who|Whose|Whether|How|Which|Where|When|Why)\b")


@functools.cache
def below(top: str) -> tuple[tuple[str, str, ast.Module], ...]:
    paths = sorted((ROOT / top).rglob("*.py"))
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return tuple((path, text, ast.parse(text)) for path, text in texts.items())


def sources(*tops: str) -> Iterator[tuple[str, str, ast.Module]]:
    """Yield the path, the text and the syntax tree of every module below `tops`."""
    for top in tops:
        yield from below(top)


@functools.cache
def imported(tree: ast.Module) -> tuple[str, ...]:
    """Return the modules that `tree` imports; names from a package too, which may be modules."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "absolute imports only: they can be searched"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def within(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".")


@functools.cache
def folder_of(module: str) -> str | None:
    """Return the folder in which `module`, or a name of it, is defined; None for a library."""
    place = re.sub(r"^hearth\.(commands\b)?", lambda m: "scripts.commands" * bool(m[1]), module)
    if place.split(".")[0] not in TOPS:
        return None
    folder = ROOT / place.replace(".", "/")
    while not folder.is_dir():
        folder = folder.parent
    return folder.relative_to(ROOT).as_posix()


def room_of(folder: str) -> str:
    return "/".join(folder.split("/")[:2])


def arrows() -> dict[str, dict[str, str]]:
    """Return which folder imports which, each with one import as an example."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path, _, tree in sources(*PACKAGE, "scripts"):
        folder = path.rpartition("/")[0]
        for module in imported(tree):
            other = folder_of(module)
            if other is not None and other != folder:
                found[folder].setdefault(other, f"{path} imports {module}")
    return found


def circles(graph: dict[str, dict[str, str]]) -> list[str]:
    """Return an example of each arrow of `graph` that leads back to where it comes from."""

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            fresh = set(graph.get(todo.pop(), ())) - seen
            seen |= fresh
            todo += fresh
        return seen

    return [
        f"{folder} -> {other} -> ... -> {folder}: {example}"
        for folder, others in sorted(graph.items())
        for other, example in sorted(others.items())
        if folder in reached(other)
    ]


# ---------------------------------------------------------------- the tree


def test_no_circle_of_imports_is_between_rooms_or_between_the_folders_of_a_room() -> None:
    """A room's own files and the folders in it may import each other."""
    rooms: dict[str, dict[str, str]] = defaultdict(dict)
    inner: dict[str, dict[str, str]] = defaultdict(dict)
    for folder, others in arrows().items():
        for other, example in others.items():
            if room_of(folder) != room_of(other):
                rooms[room_of(folder)][room_of(other)] = example
            elif folder.count("/") > 1 and other.count("/") > 1:
                inner[folder][other] = example
    errors = circles(rooms) + circles(inner)
    assert not errors, "\n".join(errors)


def test_no_room_imports_one_above_it() -> None:
    errors = []
    for order in ORDER:
        for folder, others in arrows().items():
            room = room_of(folder)
            if room not in order:
                continue
            above = order[order.index(room) + 1 :]
            errors += [text for other, text in others.items() if room_of(other) in above]
    assert not errors, "\n".join(errors)


def test_every_room_of_the_package_has_its_place_in_the_order() -> None:
    rooms = {room_of(path.rpartition("/")[0]) for path, _, _ in sources(*PACKAGE)}
    assert rooms == {room for order in ORDER for room in order}


def test_rooms_that_stand_apart_do_not_import_each_other() -> None:
    errors = [
        f"{path}: must not import {module}"
        for path, _, tree in sources(*PACKAGE, "scripts")
        for module in imported(tree)
        for prefix, names in APART.items()
        if path.startswith(prefix) and any(within(module, name) for name in names)
    ]
    assert not errors, "\n".join(errors)


def test_a_library_is_imported_only_where_it_is_at_home() -> None:
    errors = [
        f"{path}: {name} is imported only in {', '.join(homes)}"
        for path, _, tree in sources(*PACKAGE)
        for module in imported(tree)
        for name, homes in ONLY_IN.items()
        if within(module, name) and not path.startswith(homes)
    ]
    assert not errors, "\n".join(errors)


def test_the_package_is_imported_as_hearth() -> None:
    errors = [
        f"{path}: hearth.{module}"
        for path, _, tree in sources(*TOPS)
        for module in imported(tree)
        if module.split(".")[0] in PACKAGE
    ]
    assert not errors, "\n".join(errors)


def test_no_test_imports_from_another_and_helpers_import_from_none() -> None:
    errors = [
        f"{path}: imports {module}; what tests share is in tests/helpers or scripts/harness"
        for path, _, tree in sources("tests")
        for module in imported(tree)
        if within(module, "tests") and not within(module, "tests.helpers")
    ]
    assert not errors, "\n".join(errors)


# ---------------------------------------------------------------- sentences and names


def test_a_module_begins_with_a_sentence_that_says_what_it_is() -> None:
    errors = []
    for path, text, tree in sources(*TOPS):
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if text.strip() and (RIDDLE.match(first) or not first.endswith(".")):
            errors.append(f"{path}: {first or 'no docstring'}")
    assert not errors, "\n".join(errors)


def test_a_public_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path, _, tree in sources(*PACKAGE):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared, shared


def test_few_tests_read_private_names() -> None:
    """A public property, method or parameter lets a class change while its tests stay."""
    readers = {
        path: sorted(names)
        for path, _, tree in sources("tests")
        if (names := set(private_names(tree)) - set(UPSTREAM_NAMES))
    }
    assert len(readers) <= PRIVATE_READERS_MAX, readers


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that `tree` reads of others, patches or imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called), args=args):
                given = [arg.value for arg in args if isinstance(arg, ast.Constant)]
                names = [text for text in given if called in BY_NAME and isinstance(text, str)]
            case _:
                continue
        yield from (found[2] for name in names if (found := PRIVATE.fullmatch(name)))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("self._a; cls._b; a.b; a.__dict__", []),
        ("a._b; self.a._c", ["_b", "_c"]),
        ("from hearth.shared.paths import _a, b", ["_a"]),
        ("patcher.setattr(a, '_b', 1); getattr(a, '_c')", ["_b", "_c"]),
        ("patch('hearth.a._b'); patch.object(a, '_c'); find('_d')", ["_b", "_c"]),
    ],
)
def test_private_names_are_found(source: str, names: list[str]) -> None:
    assert sorted(private_names(ast.parse(source))) == names


def test_comments_tell_no_history() -> None:
    errors = [
        f"{path}:{number}: comments say why it is so; git says how it was"
        for path, text, _ in sources(*TOPS)
        for number, line in enumerate(text.splitlines(), start=1)
        if HISTORY.search(line) and path != "tests/test_tidy.py"
    ]
    assert not errors, "\n".join(errors)


# ---------------------------------------------------------------- habits


def test_nothing_is_caught_without_a_name() -> None:
    bare = [
        f"{path}:{node.lineno}"
        for path, _, tree in sources(*PACKAGE, "scripts")
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare, bare


def test_the_environment_is_read_for_settings_in_one_place_only() -> None:
    """Others may hand `os.environ` on whole (to load_settings, to a child), not read from it.

    But for where the builtin models lie: commands and tests say it as they say the hub's HF_HOME.
    """
    reads = re.compile(r"os\.(getenv|environ\.get|environ\[)")
    found = [
        path
        for path, text, _ in sources("shared", "worker")
        for line in text.splitlines()
        if reads.search(line)
    ]
    assert found == ["shared/models/model_path.py"], found
