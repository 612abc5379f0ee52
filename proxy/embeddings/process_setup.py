"""Makes the process of EMBEDDING_MODEL and RERANK_MODEL ready to be started, from the settings."""

import logging
from collections.abc import Mapping

from hearth.proxy.embeddings.embedding_process import EmbeddingProcess, EmbeddingSettings
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.encoder_names import encoders_of
from hearth.shared.models.model_path import check_model, named_model
from hearth.shared.settings_from_env import Settings

log = logging.getLogger(__name__)


def embedding_process(
    settings: Settings, environ: Mapping[str, str], pool: WorkerPool
) -> EmbeddingProcess | None:
    """Return the process, which the first request starts; None where neither model is set.

    Raises:
        StartError: a setting names what cannot be a model, or one whose name cannot be served.
    """
    encoders_of(settings)  # refuses names
    embedding = _named(settings.embedding_model, "EMBEDDING_MODEL")
    rerank = _named(settings.rerank_model, "RERANK_MODEL")
    if not embedding and not rerank:
        return None
    told = EmbeddingSettings(embedding, rerank, environ=environ)
    return EmbeddingProcess(told, lambda: pool.is_answering)


def _named(source: str, setting: str) -> str:
    """Return the directory or the hub id that `source` names; "" where nothing is set."""
    if not source:
        return ""
    log.info("%s is %s", setting, check_model(source, setting))
    return str(named_model(source, setting))
