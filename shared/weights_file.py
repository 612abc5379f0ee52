"""Names the file beside a worker's socket that tells other workers what its weights take."""

from pathlib import Path
from typing import Final

WEIGHTS_SUFFIX: Final = ".weights"


def weights_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(WEIGHTS_SUFFIX)
