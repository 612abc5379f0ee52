"""Tells on which machine and commit a run was made. No host or user is named."""

import subprocess
import time

from hearth.shared.paths import CODE_DIR
from hearth.worker.doctor.checked_machine import machine_facts


def machine_text() -> str:
    """Return chip, cores, memory and system."""
    row = machine_facts()
    return f"{row['chip']}, {row['cores']} cores, {row['memory_gb']:.0f} GiB, {row['system']}"


def commit() -> str:
    """Return the commit of a checkout, with + where files differ from it; "" in an install."""
    if not (CODE_DIR / ".git").exists():
        return ""
    command = ("git", "-C", str(CODE_DIR), "describe", "--always", "--exclude=*", "--dirty=+")
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def now() -> str:
    """Return the time in UTC, to a second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
