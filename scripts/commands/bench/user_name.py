"""Tells who runs the bench, so that no file of it says so."""

import getpass


def user_name() -> str:
    """Return who runs this; "" for a user without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
