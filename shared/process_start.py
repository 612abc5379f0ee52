"""Readies a process that computes, before it is anything else."""

import os
from typing import Final

from hearth.shared.logging_setup import configure
from hearth.shared.open_files import raise_open_file_limit
from hearth.shared.paths import env_file
from hearth.shared.private_temp_directory import temp_environment
from hearth.shared.settings_from_env import Settings, load_settings
from hearth.shared.thread_turns import take_short_turns

OPEN_FILES: Final = 4096
OPEN_FILES_MIN: Final = 128


def begin_process(name: str) -> Settings:
    """Return the settings; logs are of `name`, and what MLX compiles goes where nobody else writes.

    Raises:
        StartError: a setting is wrong, too few files may be open, or no directory is private.
    """
    take_short_turns()
    raise_open_file_limit(OPEN_FILES, OPEN_FILES_MIN)
    settings = load_settings(os.environ, env_file())
    configure(settings.log_level.upper(), name, settings.log_prompts)
    os.environ |= temp_environment(os.environ, settings.instance_dir)
    return settings
