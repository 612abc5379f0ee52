"""Makes the parts of a worker that depend on RANKS, for a worker of one process."""

from typing import Any, Final

from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.layer_kinds.kinds import kinds_in

UNLIMITED: Final = 1 << 62  # bytes


class SingleRank:
    """Makes the parts of a worker with RANKS=1. For more ranks see `worker/ranks/leading_rank.py`.

    Owner: the inference thread.
    """

    ranks_here = 1  # processes of this model that share this machine's memory

    def part(self) -> Any:
        """Return the loader of this rank's part of the model; None = the whole model is loaded."""
        return None

    def joined(self, loaded: LoadedModel) -> LoadedModel:
        """Return the model with the facts of all ranks, once all have loaded their parts.

        Raises:
            StartError: a rank could not load its part; the text is from that rank.
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
        merges = all(kind.merges for kind in kinds_in(loaded.facts.cache_layout))
        return Engine(loaded, batches and merges, vision, packed, trees)

    def layer_map(self, probe: list[Any]) -> LayerMap:
        """Raises UnknownCache, and StartError as in `LeadingLayerMap`."""
        return LayerMap(probe)

    def disk_thread(self, file_store: FileStore, queue_bytes: int) -> DiskThread:
        return DiskThread(file_store, queue_bytes)

    def forward(self, forward: ForwardMemory) -> ForwardMemory:
        """Return the memory that this rank's part of a forward takes."""
        return forward

    def limit(self, used: int) -> int:
        """Return how many bytes this process may take before another rank exceeds its limit.

        `used` is the number of bytes that this process takes now.
        """
        return UNLIMITED

    def tidy(self) -> None:
        """Have idle other ranks release the memory that this rank has released."""

    def report(self, used_bytes: int) -> dict[str, Any] | None:
        """Return the ranks for `/v1/cache`, None for one rank; this rank takes `used_bytes`."""
        return None

    def end(self) -> None:
        """End the other ranks once these have written. The inference thread has ended before."""

    def wait_for_rank_failure(self) -> None:
        """If another rank's end has caused an error in this process, report that and exit."""
