"""Which environment makes glibc give memory back. Nothing of this concerns macOS.

On a CPU MLX's arrays come from malloc. By default glibc takes blocks of up to 32 MB from its heaps
once some were freed, and what lies between living blocks stays: a worker that held 150 MB had
659 MB after 20 minutes of scripts/soak.py. Blocks that are mapped go back when they are freed.
"""

import sys
from collections.abc import Mapping

_WANTED = {
    "MALLOC_MMAP_THRESHOLD_": "262144",  # bytes from which on a block is mapped, and never more
    "MALLOC_ARENA_MAX": "2",  # heaps; one a thread is the default
}


def malloc_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to `environ` for a process that runs MLX; what is set there stays."""
    if sys.platform != "linux":
        return {}
    return {name: value for name, value in _WANTED.items() if name not in environ}
