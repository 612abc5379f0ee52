"""Tells where Hearth runs from: a checkout of its repository, or an installed package."""

import re
from pathlib import Path
from typing import Final


def working_directory() -> Path:
    """Return where the command was started; home, where that directory is gone."""
    try:
        return Path.cwd()
    except OSError:
        return Path.home()


def without_home(text: str) -> str:
    """Return `text` with ~ for this user's home, but not in the paths of /home/anna for /home/ann.

    In a container the home may be /, which tells nothing of anybody.
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
    """Return the settings file: the checkout's; in an install `~/.hearth/.env`.

    Never the working directory's: agents are launched in projects that others wrote, and a file
    there could name the server that is sent the key and every question.
    """
    return (CODE_DIR if IS_CHECKOUT else HOME_DIR) / ".env"
