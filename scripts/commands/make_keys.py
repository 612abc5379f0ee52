"""Makes the CURVE keys with which a proxy and its workers on other machines know each other.

    hearth keys [DIRECTORY]

Writes a pair for the workers and one for the proxy into DIRECTORY (CURVE_KEYS_DIR unless given),
readable by this user only, and says which file goes where.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zmq.auth import create_certificates

from hearth.shared.errors import StartError
from hearth.shared.paths import env_file
from hearth.shared.settings_from_env import load_settings
from hearth.shared.zmq_transport import PROXY_NAME, WORKER_NAME, private_directory


def make_keys(directory: Path) -> None:
    """Write both pairs into `directory`, which is made for its owner alone.

    Raises:
        StartError: keys are there already, or the directory cannot be made private.
    """
    private_directory(directory, "CURVE_KEYS_DIR")
    if present := sorted(path.name for path in directory.glob("*.key*")):
        raise StartError(f"{directory} holds {', '.join(present)}; remove them to make new keys.")
    before = os.umask(0o077)  # the library writes secrets with the umask's mode
    try:
        for name in (WORKER_NAME, PROXY_NAME):
            create_certificates(directory, name)
    finally:
        os.umask(before)


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
        make_keys(directory.expanduser().absolute())
    except StartError as error:
        print(f"hearth keys: {error}", file=sys.stderr)
        return 1
    print(f"{directory}: on the workers' machines keep {WORKER_NAME}.key_secret, {PROXY_NAME}.key")
    print(f"{directory}: on the proxy's machine keep {PROXY_NAME}.key_secret, {WORKER_NAME}.key")
    return 0


if __name__ == "__main__":
    sys.exit(main())
