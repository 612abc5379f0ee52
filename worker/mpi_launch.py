"""Has Open MPI start the processes of all ranks, which it alone knows as one group.

A worker with RANK_BACKEND=mpi becomes `mpirun`, which starts it again as rank 0 and the others
beside it (`worker/mpi_rank.py`). Signals and the standard input reach rank 0 through it, and
its exit code is rank 0's.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.shared.stop_times import CHUNK_WAIT_S, END_WAIT_S, FLUSH_WAIT_S
from hearth.worker.ranks.transport.rank_processes import MPI_RANK_VARIABLE

LIBRARIES: Final = ("libmpi.dylib", "libmpi.so.40", "libmpi.so")  # a wheel has text in the last
LIBRARY_VARIABLE: Final = "MLX_MPI_LIBNAME"  # MLX looks for libmpi.so or .dylib by itself


def become_mpirun(settings: Settings, arguments: Sequence[str]) -> None:
    """Replace this process by an `mpirun` that starts it again, where RANK_BACKEND is mpi.

    It returns in a process that `mpirun` started.

    Raises:
        StartError: there is no `mpirun`, or ranks are elsewhere.
    """
    is_asked = settings.ranks > 1 and settings.rank_backend == "mpi"
    if not is_asked or MPI_RANK_VARIABLE in os.environ:
        return
    if settings.rank_hosts is not None:
        raise StartError(
            "RANK_BACKEND is mpi and RANK_HOSTS names machines: with mpi all ranks are on this "
            "one. Set RANK_BACKEND=ring, or leave RANK_HOSTS empty."
        )
    found = shutil.which("mpirun")
    if found is None:
        raise StartError(
            "RANK_BACKEND is mpi and no mpirun is found. Install Open MPI, or use ring."
        )
    environ = {**os.environ, **library_of(Path(found), os.environ)}
    os.execve(found, command_of(found, settings, arguments), environ)


def command_of(mpirun: str, settings: Settings, arguments: Sequence[str]) -> list[str]:
    """Return the command of all ranks.

    One that is lost is rank 0's to find, who says which it was (recoverable): mpirun would end
    all of them first. Rank 0 that is told to end has as long as the supervisor gives it.
    """
    wait_s = CHUNK_WAIT_S + FLUSH_WAIT_S + END_WAIT_S
    how = ["--oversubscribe", "--rtos", "recoverable"]
    how += ["--prtemca", "odls_base_sigkill_timeout", f"{wait_s:.0f}"]
    rank = [sys.executable, "-m", "hearth.worker.mpi_rank", *arguments]
    return [mpirun, *how, "-np", str(settings.ranks), *rank]


def library_of(mpirun: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what has MLX find the library that belongs to `mpirun`, and that one its own.

    A library that the user named stays. Source: mlx.launch.
    """
    directory = mpirun.resolve().parent.parent / "lib"
    there = [str(directory / name) for name in LIBRARIES if (directory / name).exists()]
    if not there or LIBRARY_VARIABLE in environ:
        return {}
    path = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    before = environ.get(path)
    return {
        LIBRARY_VARIABLE: there[0],
        path: f"{directory}:{before}" if before else str(directory),
    }
