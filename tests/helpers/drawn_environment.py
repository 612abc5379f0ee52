"""Runs a command as on a stranger's machine: HOME, PATH, variables, zone, locale, umask are drawn.

    python3 -m tests.helpers.drawn_environment [SEED] COMMAND [ARGUMENT ...]

It prints its seed; the same SEED, or HEARTH_DRAW=SEED, draws the same again (with the command `env`
all of it is seen). Caches of packages stay where they are. Standard library only: `.ci/run` starts
it.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[2]
HOME_PARTS: Final = ("with a space", "Jörg Ñandú", "山田", "e\u0301tude", "long-" * 24)
HOME_ENDS: Final = ("home", "tmp", "user", "ann")
ZONES: Final = ("Pacific/Chatham", "Asia/Kathmandu", "America/St_Johns", "Pacific/Kiritimati")
# Some are installed nowhere, as where ssh brings the names of another machine.
LOCALES: Final = ("C", "POSIX", "C.UTF-8", "tr_TR.UTF-8", "de_DE.ISO-8859-1", "en_US.UTF-8")
NAME_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"
VALUES: Final = (
    *("", " ", "0", "=", "a=b", "line\nline", "\x1b[31m", "$(false)", "`false`", "${HOME", "%s%n"),
    *("{0}", "'", '"', "\\", "~", "*", "é", "日本語", "\udcff", "-" * 3000, "() { :; }", "#no"),
)
VARIABLES_COUNT: Final = 20
PATH_ENTRIES_COUNT: Final = 40
# Where the caller's caches and settings of package managers are, so that nothing comes twice.
KEPT: Final = {
    "HEARTH_CLIENTS": ".cache/hearth/clients",
    "NPM_CONFIG_CACHE": ".npm",
    "NPM_CONFIG_USERCONFIG": ".npmrc",
    "PIP_CACHE_DIR": ".cache/pip",
    "PIP_CONFIG_FILE": ".config/pip/pip.conf",
    "PYENV_ROOT": ".pyenv",
    "UV_CACHE_DIR": ".cache/uv",
}


def draw(seed: str, place: Path) -> dict[str, str]:
    """Return the variables that `seed` sets, with a HOME below `place`."""
    chance = random.Random(seed)
    parts = chance.sample(HOME_PARTS, chance.randint(2, 4))
    home = place.joinpath(*parts, chance.choice(HOME_ENDS))
    drawn = {"HOME": str(home), "TZ": chance.choice(ZONES), "LC_ALL": chance.choice(LOCALES)}
    if chance.random() < 0.5:
        drawn["XDG_CONFIG_HOME"] = str(home / "my config")
        drawn["XDG_CACHE_HOME"] = str(home / "my cache")
    for _ in range(VARIABLES_COUNT):
        letters = "".join(chance.choices(NAME_LETTERS, k=chance.randint(1, 60)))
        drawn[f"{chance.choice('QXZ_qxz')}{letters}"] = chance.choice(VALUES)
    entries = [f"/opt/{chance.choice(HOME_PARTS)}/{n}/bin" for n in range(PATH_ENTRIES_COUNT)]
    cut = chance.randint(0, PATH_ENTRIES_COUNT)
    drawn["PATH"] = ":".join([*entries[:cut], os.environ.get("PATH", ""), *entries[cut:]])
    return drawn


def surroundings(drawn: dict[str, str]) -> dict[str, str]:
    """Return the environment of the command: ours, what is `drawn`, and where our caches are."""
    known = {n: v for n, v in os.environ.items() if not n.startswith(("XDG_", "LC_", "LANG"))}
    kept = {name: str(Path.home() / path) for name, path in KEPT.items()}
    git = {"COUNT": "1", "KEY_0": "safe.directory", "VALUE_0": str(PROJECT)}
    kept |= {f"GIT_CONFIG_{name}": value for name, value in git.items()}
    return {**kept, **known, **drawn}


@contextlib.contextmanager
def drawn_surroundings(given: str | None = None) -> Iterator[dict[str, str]]:
    """Yield a drawn environment whose HOME exists meanwhile, and set the umask.

    It is what `given` or else HEARTH_DRAW draws again, or a new one; its seed is printed.
    """
    given = given or os.environ.get("HEARTH_DRAW")
    seed = given or str(random.SystemRandom().randrange(10**6))
    with tempfile.TemporaryDirectory(prefix="hearth-drawn-") as place:
        drawn = draw(seed, Path(place))
        Path(drawn["HOME"]).mkdir(parents=True)
        told = f"HEARTH_DRAW={seed} TZ={drawn['TZ']} LC_ALL={drawn['LC_ALL']} umask=077"
        print(f"== drawn environment: {told}", file=sys.stderr, flush=True)
        before = os.umask(0o077)
        try:
            yield surroundings(drawn)
        finally:
            os.umask(before)


def main(arguments: list[str]) -> int:
    """Run the command of `arguments` in what is drawn, and return its exit status."""
    with drawn_surroundings(arguments.pop(0) if arguments[0].isdigit() else None) as environ:
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal tells the command itself
        child = subprocess.Popen(arguments, env=environ)
        signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
        return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
