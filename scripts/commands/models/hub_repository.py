"""Asks the hub what a repository holds, and tells what it refuses with the remedy."""

import contextlib
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
from huggingface_hub import HfApi, ResolvedRevision, constants, get_token, resolve_revision
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.hf_api import RepoSibling
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

CODE_SUFFIX: Final = ".py"
WEIGHTS_PATTERN: Final = "model*.safetensors"
_FOREIGN: Final = (".gguf", ".bin", ".pt", ".pth", ".onnx", ".npz")
_TOKENS_PAGE: Final = "settings/tokens"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_LARGE_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAME_BYTES_MAX: Final = 255
_BYTES_MAX: Final = 1024**5  # of a file
_SMALL_BYTES_MAX: Final = 64 * 1024**2  # git holds text; a hub keeps larger files in its store
# What its library raises at an answer of another form than a hub's.
_MALFORMED: Final = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    AssertionError,
    RecursionError,
)


class ModelError(Exception):
    """A model cannot be listed, fetched or removed. Its text tells the remedy."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository, as the hub tells it. Immutable."""

    path: str
    nbytes: int
    digest: str  # hex: SHA-256 of a large file, else git's SHA-1 of a blob
    is_large: bool  # kept in the hub's store of large files


@dataclass(frozen=True, slots=True)
class HubModel:
    """One revision of a repository: the files of it that serving takes. Immutable."""

    hub_id: str
    revision: ResolvedRevision  # the branch, and the commit that it stood for
    files: tuple[HubFile, ...]

    @property
    def code(self) -> list[str]:
        return [file.path for file in self.files if file.path.endswith(CODE_SUFFIX)]

    @property
    def weight_bytes(self) -> int:
        return sum(f.nbytes for f in self.files if fnmatch.fnmatch(f.path, WEIGHTS_PATTERN))

    @property
    def folder(self) -> Path:
        """Where the hub's cache keeps this repository, as its documentation says."""
        return Path(constants.HF_HUB_CACHE) / f"models--{self.hub_id.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.revision.resolved


def look_up(hub_id: str) -> HubModel:
    """Return what the hub has under `hub_id` now, without a byte of it. Call it within `remedies`.

    Raises:
        ModelError: there is nothing that could be served.
    """
    with _well_formed(hub_id):
        revision = resolve_revision(hub_id)
        _check(_COMMIT.fullmatch(revision.resolved))  # it becomes a folder's name
        siblings = HfApi().model_info(hub_id, revision=revision, files_metadata=True).siblings or ()
        names = [sibling.rfilename for sibling in siblings]
        files = tuple(_hub_file(each) for each in siblings if _is_wanted(each.rfilename))
    _refuse_unservable(hub_id, {file.path for file in files}, names)
    return HubModel(hub_id, revision, files)


@contextlib.contextmanager
def _well_formed(hub_id: str) -> Iterator[None]:
    """Raise ModelError where an answer is none that a hub gives."""
    try:
        yield
    except (OSError, HFValidationError):  # some are ValueErrors too
        raise
    except _MALFORMED as error:
        raise ModelError(
            f"{_endpoint()} answers for {hub_id} with what is no listing of a hub. Check "
            "HF_ENDPOINT, or that no sign-in page of this network answers in its place."
        ) from error


def _check(is_so: object) -> None:
    if not is_so:
        raise ValueError("not as a hub tells it")


def _hub_file(sibling: RepoSibling) -> HubFile:
    """Return a file as a hub tells it, whose digest becomes a name in the cache.

    Raises:
        ModelError: it could not be checked.
        ValueError: a size or a digest is none.
    """
    is_large = sibling.lfs is not None
    digest, size = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id, sibling.size
    if size is None or digest is None:
        raise ModelError(
            f"{_endpoint()} tells no size or digest of {sibling.rfilename}, so that it could not "
            "be checked. Use another mirror (HF_ENDPOINT)."
        )
    _check((_LARGE_DIGEST if is_large else _COMMIT).fullmatch(digest.lower()))
    _check(type(size) is int and 0 <= size <= (_BYTES_MAX if is_large else _SMALL_BYTES_MAX))
    return HubFile(sibling.rfilename, size, digest.lower(), is_large)


def _is_wanted(name: str) -> bool:
    """Whether serving takes a file: one that mlx-lm fetches, on a plain path that leads not out.

    They name no pickles, whose loading would run code.
    """
    parts = name.split("/")
    is_inside = all(parts) and parts.count("..") == parts.count(".") == 0
    is_inside = is_inside and name.isprintable() and len(name.encode()) <= _NAME_BYTES_MAX
    return is_inside and any(fnmatch.fnmatch(name, each) for each in DEFAULT_ALLOW_PATTERNS)


def _refuse_unservable(hub_id: str, names: set[str], all_names: list[str]) -> None:
    has_weights = any(fnmatch.fnmatch(name, WEIGHTS_PATTERN) for name in names)
    if "config.json" in names and has_weights:
        return
    other = sorted({name[name.rfind(".") :] for name in all_names if name.endswith(_FOREIGN)})
    found = f" It has {', '.join(other)} files, which MLX does not load." if other else ""
    missing = "config.json" if has_weights else f"{WEIGHTS_PATTERN} files"
    raise ModelError(
        f"{hub_id} has no {missing}, so it is no model that can be served.{found} Look for a "
        "conversion of it, e.g. by mlx-community."
    )


@contextlib.contextmanager
def remedies(hub_id: str) -> Iterator[None]:
    """Turn what the hub, or the way to it, can raise into a ModelError."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ModelError(_offline(hub_id)) from error
    except (RevisionResolutionError, LocalEntryNotFoundError) as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(_offline(hub_id)) from error
        raise ModelError(_unreachable(_cause(error))) from error
    except GatedRepoError as error:
        raise ModelError(
            f"{_endpoint()} gives {hub_id} only to who has accepted its terms. Accept them on "
            f"{_endpoint()}/{hub_id}, then log in (`hf auth login`) or set HF_TOKEN to a token "
            f"from {_endpoint()}/{_TOKENS_PAGE}, and pull again."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(_not_found(hub_id, error)) from error
    except HFValidationError as error:
        raise ModelError(f"{hub_id!r} is no hub id (owner/name).") from error
    except HfHubHTTPError as error:
        raise ModelError(_refused(hub_id, error)) from error
    except (httpx.HTTPError, ConnectionError, TimeoutError) as error:
        raise ModelError(_unreachable(error)) from error
    except OSError as error:
        raise ModelError(_not_written(hub_id, error)) from error


def _endpoint() -> str:
    """Return the hub's address without the password that a mirror's may hold."""
    parts = urlsplit(constants.ENDPOINT)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _offline(hub_id: str) -> str:
    return (
        f"HF_HUB_OFFLINE is set, so that {_endpoint()} is not asked for {hub_id}. Unset it to "
        "fetch this model; `hearth models` lists those that are here."
    )


def _not_found(hub_id: str, error: HfHubHTTPError) -> str:
    """Return the text for a repository that is not there, or not for this token: both are a 401."""
    is_sent = get_token() is not None
    token = "the token that was sent may not see it" if is_sent else "no token was sent"
    return (
        f"{_endpoint()} knows no {hub_id} ({error.response.status_code}): it is not there, or it "
        f"is private and {token}. Check the name; for a private one log in (`hf auth login`) or "
        f"set HF_TOKEN to a token from {_endpoint()}/{_TOKENS_PAGE}."
    )


def _refused(hub_id: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403):
        return (
            f"{_endpoint()} refuses {hub_id} ({status}). Log in (`hf auth login`) or set HF_TOKEN "
            f"to a token from {_endpoint()}/{_TOKENS_PAGE} that may read it."
        )
    return f"{_endpoint()} answers {status} for {hub_id}. Pull again later: what came is kept."


def _unreachable(error: BaseException) -> str:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{_endpoint()} cannot be reached ({reason}). Check the network, and HF_ENDPOINT if you "
        "use a mirror; then pull again: what came is kept."
    )


def _not_written(hub_id: str, error: OSError) -> str:
    reason = error.strerror or " ".join(str(error).split())[:200]
    return (
        f"{hub_id} cannot be written into {constants.HF_HUB_CACHE} ({reason}). Make room or give "
        "this user access there, or set HF_HOME to another disk, and pull again."
    )


def _cause(error: BaseException) -> BaseException:
    """Return what an error came from, which the hub's library wraps in advice of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
