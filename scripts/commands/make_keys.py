"""Makes the CURVE keys with which processes on several machines know each other.

    hearth keys [DIRECTORY]

Writes a pair for the workers, one for the proxy and one for the ranks of a model into DIRECTORY
(CURVE_KEYS_DIR unless given), readable by this user only, and says which file goes where. A pair
of which there is a file already stays as it is.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zmq.auth import create_certificates

from hearth.shared.errors import StartError
from hearth.shared.paths import env_file
from hearth.shared.private_files import private_directory
from hearth.shared.settings import load_settings
from hearth.shared.zmq_transport import PROXY_NAME, RANK_NAME, WORKER_NAME

PLACES: Final = {
    WORKER_NAME: f"on the workers' machines keep {WORKER_NAME}.key_secret, {PROXY_NAME}.key",
    PROXY_NAME: f"on the proxy's machine keep {PROXY_NAME}.key_secret, {WORKER_NAME}.key",
    RANK_NAME: f"on all machines of one model keep {RANK_NAME}.key_secret, {RANK_NAME}.key",
}


def make_keys(directory: Path) -> list[str]:
    """Write the pairs that are missing into `directory`, which is made for its owner alone.

    Returns whose they are.

    Raises:
        StartError: all are there already, or the directory cannot be made private.
    """
    private_directory(directory, "CURVE_KEYS_DIR")
    names = [name for name in PLACES if not [*directory.glob(f"{name}.key*")]]
    if not names:
        present = ", ".join(sorted(path.name for path in directory.glob("*.key*")))
        raise StartError(f"{directory} holds {present}; remove them to make new keys.")
    before = os.umask(0o077)  # the library writes secrets with the umask's mode
    try:
        for name in names:
            create_certificates(directory, name)
    finally:
        os.umask(before)
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hearth keys",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", nargs="?", type=Path, help="default: CURVE_KEYS_DIR")
    options = parser.parse_args(arguments)
    try:
        directory = options.directory
        if directory is None:
            directory = load_settings(os.environ, env_file()).curve_keys_dir
        names = make_keys(directory.expanduser().absolute())
    except StartError as error:
        print(f"hearth keys: {error}", file=sys.stderr)
        return 1
    for name in names:
        print(f"{directory}: {PLACES[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
