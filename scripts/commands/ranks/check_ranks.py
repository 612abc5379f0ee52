"""Runs `hearth ranks check`: starts all ranks as a server would, and shows what they find."""

import logging
import os
import sys
import time

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.logging_setup import configure
from hearth.shared.paths import env_file
from hearth.shared.private_files import private_directory
from hearth.shared.process_start import temp_environment
from hearth.shared.settings import Settings, load_settings

CHECK_ID = 99  # of the sockets in RUN_DIR: a server's workers have 0 to 15


def check() -> int:
    """Print a line for each thing that is checked; return 0 where all of it is good."""
    try:
        settings = load_settings(os.environ, env_file())
        _refuse(settings)
        configure("WARNING", "rank 0")
        logging.getLogger("hearth.worker.ranks").setLevel(logging.INFO)
        private_directory(settings.instance_dir)
        os.environ |= temp_environment(os.environ, settings.instance_dir)
        # MLX, which a mistake in the settings needs not
        from hearth.commands.ranks.compare_ranks import check_ranks
        from hearth.worker.ranks.start_ranks import start_ranks

        began = time.monotonic()
        started = start_ranks(settings, CHECK_ID, print, purpose="check")
    except StartError as error:
        print(f"hearth ranks check: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    print(f"{'joined':20} {time.monotonic() - began:.1f} s after the start", flush=True)
    are_good = True
    for row in check_ranks(started.link, started.group, settings):
        print(f"{row.what:20} {row.found}{'' if row.is_good else '  <-- differs'}", flush=True)
        are_good &= row.is_good
    started.link.close()
    started.processes.close()
    return 0 if are_good else 1


def _refuse(settings: Settings) -> None:
    if settings.ranks < 2:
        raise StartError("RANKS is 1: there is nothing to check. Set it to 2 or more.")
