"""Holds pyproject.toml to the tree: packages, files, and each dependency that is imported."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.paths import PROJECT_DIR

PYPROJECT: dict[str, Any] = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
# The distribution of a module that is not called as it.
DISTRIBUTIONS = {
    **{"zmq": "pyzmq", "PIL": "pillow", "dotenv": "python-dotenv", "mlx_lm": "mlx-lm"},
    "yaml": "pyyaml",
}
# What comes with a dependency that could not work without it.
BROUGHT = {
    **{"transformers": "mlx-lm", "tokenizers": "mlx-lm", "jinja2": "mlx-lm"},
    **{"httpx": "huggingface-hub", "filelock": "huggingface-hub", "markdown_it": "rich"},
}


def folder_of(package: str) -> Path:
    """Return the folder of the tree that becomes `package`."""
    for name, folder in FOLDERS.items():
        if package == name or package.startswith(name + "."):
            return PROJECT_DIR / folder / package[len(name) + 1 :].replace(".", "/")
    raise AssertionError(f"no folder becomes {package}")


def files_of(package: str) -> Iterator[Path]:
    for path in folder_of(package).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def dependencies(rows: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9._-]", row, maxsplit=1)[0].lower() for row in rows}


def test_the_packages_are_the_folders_with_modules() -> None:
    found = set()
    for name, folder in FOLDERS.items():
        root = PROJECT_DIR / folder
        for directory in {path.parent for path in root.rglob("*.py")}:
            found.add(".".join((name, *directory.relative_to(root).parts)))
    assert sorted(found) == sorted(SETUPTOOLS["packages"])


def test_every_file_that_is_no_module_is_in_the_wheel() -> None:
    told = {
        path
        for name, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in folder_of(name).glob(pattern)
    }
    lost = [path for root in FOLDERS for path in files_of(root) if path.suffix != ".py"]
    assert [path for path in lost if path not in told] == []


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules that `path` imports, without those of the standard library and our own."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top != "hearth":
                yield top


def test_what_is_imported_is_a_dependency_and_nothing_outside_the_package_is() -> None:
    declared = dependencies(PROJECT["dependencies"])
    optional = dependencies(PROJECT["optional-dependencies"]["vision"])
    undeclared = []
    for root in FOLDERS:
        for path in files_of(root):
            for module in imports_of(path) if path.suffix == ".py" else ():
                known = BROUGHT.get(module) or DISTRIBUTIONS.get(module, module.replace("_", "-"))
                if not {known, module} & (declared | optional):
                    undeclared.append(f"{path.relative_to(PROJECT_DIR)}: {module}")
    assert not undeclared, "\n".join(undeclared)


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_every_script_names_a_function_that_is_there(name: str) -> None:
    module, _, function = PROJECT["scripts"][name].partition(":")
    package, _, stem = module.rpartition(".")
    tree = ast.parse((folder_of(package) / f"{stem}.py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
