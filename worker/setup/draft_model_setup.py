"""Loads the draft model of DRAFT_MODEL beside the model, and counts its weights with those."""

from collections.abc import Callable
from dataclasses import replace

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.worker.engine.decode.draft_model_loader import find_draft_model, load_draft_model
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.kv.layer_adapters import raw_rows
from hearth.worker.setup.kv_setup import is_exact


class DraftModelSetup:
    """Finds a draft model before the model is loaded, and loads it behind that.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings, admit: Callable[[int], None]) -> None:
        """`admit` is called with the bytes of all weights before they are read.

        Raises:
            StartError: DRAFT_MODEL names nothing that can draft.
        """
        self._settings = settings
        self._admit = admit
        self._found = find_draft_model(settings)

    @property
    def nbytes(self) -> int:
        """What the draft model's weights take at most."""
        return self._found.nbytes if self._found is not None else 0

    def admit(self, nbytes: int) -> None:
        """Make ready for a model's weights of `nbytes`, and for those of the draft model."""
        self._admit(nbytes + self.nbytes)

    def load(self, loaded: LoadedModel) -> LoadedModel:
        """Return the model with what drafts for it, as it is where DRAFT_MODEL is empty.

        Raises:
            StartError: it does not fit the model, or nothing may be drafted for that.
        """
        if self._found is None:
            return loaded
        if is_exact(loaded, self._settings):
            raise StartError(
                f"DRAFT_MODEL is {self._found.source!r}, and in exact mode nothing is drafted. "
                "Leave DRAFT_MODEL empty, or set CACHE_EXACT=false."
            )
        return replace(loaded, draft_model=load_draft_model(self._found, loaded, raw_rows))
