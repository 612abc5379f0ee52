"""Gives tests the builtin models' real weights, fetched once a machine as users fetch them.

They lie outside HOME, which tests and CI change. Tests that call this have the mark `weights`.
Processes of tests that need them at once wait for the one that fetches.
"""

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from hearth.shared.models.model_path import MODELS_DIR_VARIABLE, builtin_model
from hearth.shared.paths import PROJECT_DIR

CONVERTER: Final = PROJECT_DIR / "scripts/commands/models/convert_smollm2.py"
# A changed conversion is another directory.
CONVERSION: Final = hashlib.sha256(CONVERTER.read_bytes()).hexdigest()[:8]
WEIGHTS_DIR: Final = Path(f"/var/tmp/hearth-test-weights-{os.getuid()}") / CONVERSION
FETCH_S_MAX: Final = 600
# No hub stands in: its files are others, and elsewhere.
_ALONE: Final = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}


def real_weights(name: str) -> Path:
    """Return the directory of the builtin model `name`; skip the test where no index has it."""
    model = builtin_model(name)
    assert model is not None, name
    directory = WEIGHTS_DIR / f"{model.name}-{model.version}"
    if not directory.is_dir() and (why := _why_not(name)):
        pytest.skip(f"no index gives {name}'s weights: {why}")
    return directory


@cache
def _why_not(name: str) -> str:
    """Fetch the model; return why it is not to be had, which one process asks once."""
    done = subprocess.run(
        [sys.executable, "-m", "hearth.commands.main", "pull", name],
        env={**os.environ, **_ALONE, MODELS_DIR_VARIABLE: str(WEIGHTS_DIR)},
        capture_output=True,
        text=True,
        timeout=FETCH_S_MAX,
    )
    return done.stderr.strip()[-500:] if done.returncode else ""
