"""Tells where Hearth runs from: a checkout of its repository, or an installed package."""

from pathlib import Path
from typing import Final

HOME_DIR: Final = Path("~/.hearth").expanduser()
_ABOVE: Final = Path(__file__).resolve().parent.parent
IS_CHECKOUT: Final = (_ABOVE / "install_and_run.py").is_file()
# Relative paths in settings count from here: the checkout, else where the command was started.
PROJECT_DIR: Final = _ABOVE if IS_CHECKOUT else Path.cwd()


def env_file() -> Path:
    """Return the settings file: the checkout's; in an install `./.env`, else `~/.hearth/.env`."""
    found = PROJECT_DIR / ".env"
    return found if IS_CHECKOUT or found.is_file() else HOME_DIR / ".env"


def default_log_root() -> Path:
    """Return the directory of logs where no setting names one."""
    return PROJECT_DIR / "logs" if IS_CHECKOUT else HOME_DIR / "logs"
