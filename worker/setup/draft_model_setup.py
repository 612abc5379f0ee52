"""Loads the draft model of DRAFT_MODEL beside the model, and counts its weights with those."""

from collections.abc import Callable
from dataclasses import replace

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings
from hearth.worker.engine.draft_model_loader import find_draft_model, load_draft_model
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.setup.kv_setup import is_exact


class DraftModelSetup:
    """Finds a draft model before the model is loaded, and loads it behind that.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises StartError where DRAFT_MODEL names nothing that can draft."""
        self._settings = settings
        self._found = find_draft_model(settings)

    def admitting(self, admit: Callable[[int], None]) -> Callable[[int], None]:
        """Return what admits weights of so many bytes, and those of the draft model beside them."""
        beside = self._found.nbytes if self._found is not None else 0
        return lambda nbytes: admit(nbytes + beside)

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
        return replace(loaded, draft_model=load_draft_model(self._found, loaded))
