"""Says what computes a model: this process alone, or this one and others that do as it tells."""

from typing import Any, Final

from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.kv.layer_adapters import LayerMap

UNLIMITED: Final = 1 << 62  # bytes


class SingleRank:
    """This process alone: what RANKS=1 means. See `worker/ranks/leading_rank.py` for more.

    Owner: the inference thread.
    """

    ranks_here = 1  # processes of this model on this machine, which share its memory

    def part(self) -> Any:
        """Return what loads a part of the model; None = all is loaded."""
        return None

    def joined(self, loaded: LoadedModel) -> LoadedModel:
        """Return the model with the facts of the whole, once all ranks have loaded their parts.

        Raises:
            StartError: one could not; the text is its own.
        """
        return loaded

    def engine(
        self,
        loaded: LoadedModel,
        batches: bool,
        vision: ImageEncoder | None = None,
        packed: tuple[int, int] | None = None,
        trees: bool = False,
    ) -> Engine:
        return Engine(loaded, batches, vision, packed, trees)

    def layer_map(self, probe: list[Any]) -> LayerMap:
        """Raises: UnknownCache; StartError, see `LeadingLayerMap`."""
        return LayerMap(probe)

    def disk_thread(self, file_store: FileStore, queue_bytes: int) -> DiskThread:
        return DiskThread(file_store, queue_bytes)

    def forward(self, forward: ForwardMemory) -> ForwardMemory:
        """Return what this rank's part of a forward takes of memory."""
        return forward

    def limit(self, used: int) -> int:
        """Return how many bytes this process may take so that no other rank takes too many.

        `used` is what it takes now.
        """
        return UNLIMITED

    def tidy(self) -> None:
        """Have the other ranks give up what is gone here, where there is nothing else to do."""

    def report(self, used_bytes: int) -> dict[str, Any] | None:
        """Return for `/v1/cache` the ranks, None where there is one; `used_bytes` are its own."""
        return None

    def end(self) -> None:
        """End the other ranks, once they have written. The inference thread is over."""

    def note_broken(self) -> None:
        """Something broke here: where a rank's end is why, the process ends and says so."""
