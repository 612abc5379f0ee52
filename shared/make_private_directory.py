"""Makes directories that only their owner can enter."""

from pathlib import Path


def make_private(directory: Path) -> None:
    """Make `directory` and what its path lacks, for their owner alone. Raises: OSError.

    One by one: `mkdir(parents=True)` would leave the mode of its parents to the umask.
    """
    for each in reversed((directory, *directory.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
