"""Another BLAS, or another core that one chose, has another name; the same one has the same."""

import os
import subprocess
import sys

import pytest

from hearth.shared.linux_environment import openblas_environment

PROGRAM = "from hearth.worker.doctor.checked_machine import loaded_blas; print(loaded_blas())"


def name(**more: str) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.check_output(command, env=environ | more, text=True, timeout=120).strip()


@pytest.mark.night
@pytest.mark.process
@pytest.mark.skipif(not openblas_environment({}), reason="there is one BLAS")
def test_what_changes_the_last_bits_of_products_changes_the_name() -> None:
    preloaded = openblas_environment({})
    own, other = name(), name(**preloaded)
    assert own and other and own != other
    threads = preloaded | {"OPENBLAS_NUM_THREADS": "2"}
    assert name(**threads) == other, "threads change no bit"
    cores = {name(**preloaded, OPENBLAS_CORETYPE=core) for core in ("Nehalem", "Haswell")}
    assert len(cores) == 2 and own not in cores
