"""Prepares an agent client and a project in which it has to find three words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.helpers.clients.npm_clients import NotInstallableError, node_modules
from tests.helpers.clients.run_clients import Agent, Place
from tests.helpers.worker_processes.scripted_worker import FILES

WORDS: Final = ("amber", "basil", "cedar")


def installed(agent: Agent) -> Agent:
    """Return `agent` once its files are here; skip the test where they cannot be."""
    try:
        node_modules(agent.package)
    except NotInstallableError as error:
        pytest.skip(str(error))
    return agent


def made_place(directory: Path, url: str, files: Mapping[str, Any]) -> Place:
    """Return a new HOME with these files, and a project with the secret words."""
    place = Place(directory / "home", directory / "project", url)
    place.home.mkdir()
    place.project.mkdir()
    for (name, text), word in zip(FILES.items(), WORDS, strict=True):
        (place.project / name).write_text(text.format(word) + "\n")
    place.write(files)
    return place
