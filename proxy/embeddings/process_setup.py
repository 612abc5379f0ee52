"""Makes the process of EMBEDDING_MODEL and RERANK_MODEL ready to be started, from the settings."""

import logging
from collections.abc import Mapping

from hearth.proxy.embeddings.embedding_process import EmbeddingProcess, EmbeddingSettings
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.encoder_names import encoders_of
from hearth.shared.models.builtin_models import ModelMissing
from hearth.shared.models.model_path import check_model
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
    embedding, rerank = settings.embedding_model, settings.rerank_model
    if not embedding and not rerank:
        return None
    _check(embedding, "EMBEDDING_MODEL")
    _check(rerank, "RERANK_MODEL")
    told = EmbeddingSettings(embedding, rerank, environ=environ)
    return EmbeddingProcess(told, lambda: pool.is_answering)


def _check(source: str, setting: str) -> None:
    """Tell what `source` names, or that it has to be pulled, as each request for it is told then.

    Raises:
        StartError: it names what cannot be a model.
    """
    try:
        if source:
            log.info("%s is %s", setting, check_model(source, setting))
    except ModelMissing as error:
        log.warning("%s", error)
