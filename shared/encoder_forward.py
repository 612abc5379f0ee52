"""Names the file in which a worker that embeds says whose forward it runs.

It holds one request's id. What a worker says over its socket may be lost as it dies; a file is not.
"""

from pathlib import Path


def forwarded_path(endpoint: str) -> Path:
    """Return the file of the worker whose supervisor reaches it at `endpoint`, on ipc://."""
    return Path(endpoint.removeprefix("ipc://")).with_suffix(".forwarded")
