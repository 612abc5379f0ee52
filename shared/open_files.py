"""Makes room for the files and sockets that a process opens, as far as its hard limit goes."""

import resource

from hearth.shared.errors import StartError

REMEDY = (
    "Raise the hard limit: `ulimit -Hn 4096` as root before the start, in launchd's plist "
    "HardResourceLimits / NumberOfFiles, in systemd's unit LimitNOFILE=4096."
)


def raise_open_file_limit(wanted: int, needed: int) -> int:
    """Raise the soft limit to `wanted` files, or the hard limit; return what it is then.

    Raises:
        StartError: the hard limit is below what is `needed`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise StartError(
            f"This process may open {hard:,} files (the hard limit of `ulimit -Hn`), and needs "
            f"{needed:,}. {REMEDY}"
        )
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
        return reachable
    return soft


def open_files_max(wanted: int) -> int:
    """Return how many files this process may open; `wanted`, where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else soft
