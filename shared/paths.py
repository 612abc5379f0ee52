"""Finds the directories that Hearth runs from: a checkout, or an installed package."""

import re
from pathlib import Path
from typing import Final


def working_directory() -> Path:
    """Return the directory in which the command was started, or home if that is gone."""
    try:
        return Path.cwd()
    except OSError:
        return Path.home()


def without_home(text: str) -> str:
    """Return `text` with ~ in place of this user's home directory.

    The home /home/ann does not match in /home/anna. A home of /, as in containers, stays.
    """
    home = Path.home()
    is_all = home == home.parent
    return text if is_all else re.sub(rf"(?<!\w){re.escape(str(home))}(?![\w-])", "~", text)


HOME_DIR: Final = Path("~/.hearth").expanduser()
DEFAULT_LOG_ROOT: Final = HOME_DIR / "logs"
CODE_DIR: Final = Path(__file__).resolve().parent.parent  # a checkout, or site-packages/hearth
IS_CHECKOUT: Final = (CODE_DIR / "install_and_run.py").is_file()
# Relative paths in settings count from here, and workers run here.
PROJECT_DIR: Final = CODE_DIR if IS_CHECKOUT else working_directory()


def env_file() -> Path:
    """Return the settings file: the checkout's `.env`, or `~/.hearth/.env` in an install.

    The working directory's `.env` is never read. Agents run in projects that others wrote, and a
    file there could redirect the API key and every question to another server.
    """
    return (CODE_DIR if IS_CHECKOUT else HOME_DIR) / ".env"
