"""Lists the settings and the model name of earlier versions and specifications.

Each one that is still set causes a warning at the start, so that no user relies on a dead line.
"""

from typing import Final

FORMER_MODEL: Final = "pocket"  # former name of the default model, still accepted for it

# Setting -> its replacement, or why it has none. docs/settings.md lists the current settings.
DROPPED: Final = {
    "MODEL_FAMILY": "the checkpoint and its template say what the model is; nothing is to be set",
    "MLX_HOST": "workers speak over a private socket; PROXY_HOST says where the server listens",
    "MLX_PORT": "workers speak over a private socket; PROXY_PORT says where the server listens",
    "PROXY_STARTUP_WAIT_SECONDS": "nothing waits for a fixed time; the server says when it is "
    "ready",
    "PROMPT_CACHE_MAX_ENTRIES_GLOBAL": "kept KV is bounded by its size; set CACHE_RAM_BUDGET_MB, "
    "for the memory of a long prompt KV_BITS or CACHE_STORE_BITS",
    "PROMPT_CACHE_BLOCK_SIZE": "a block is what one forward reads; PREFILL_CHUNK sets its tokens",
    "CACHE_USE_BLOCK_INDEX": "kept KV is always found by an index",
    "CACHE_SESSION_PARTITIONING": "KV is found by its tokens, whatever the session; "
    "PROXY_API_KEYS keeps users apart",
    "VLM_CACHE_DEBUG": "the divergence report names the image that changed; LOG_PROMPTS serves "
    "the token ids of prompts",
    "CACHE_VLM_IMAGE_IDENTITY": "what an image shows is always part of what kept KV is found by",
    "SESSION_TITLES": "sessions are always shown by their first words, which are held in memory "
    "only, for their own key",
    "MAX_IMAGE_PIXELS": "an image has 40,000,000 pixels at most; the model's processor makes it "
    "smaller then",
    "VISION_CACHE_MB": "256 MB of encoded images are kept for other conversations that show them; "
    "MEMORY_LIMIT_MB bounds all that is held",
    "CACHE_STORE_QUANT_MIN_TOKENS": "prefixes of fewer than 256 tokens are stored as they are, "
    "longer ones as CACHE_STORE_BITS says",
    "EMBEDDING_IDLE_SECONDS": "the process of EMBEDDING_MODEL and RERANK_MODEL ends after 300 s "
    "without a request, until the next one",
    "SHUTDOWN_FLUSH_SECONDS": "a worker that ends writes for 2 s what is not on disk yet",
    "KEEP_AWAKE": "a Mac is always kept from idle sleep while requests run, and for 3 minutes "
    "after",
    "KV_DISK_STATE_BITS": "a hybrid's recurrent states are written as they are; MAX_KV_SIZE_GB and "
    "KV_DISK_WRITE_GB_PER_DAY bound what they take",
    "WIRE": "the weights are wired, and nothing else: KV in wired memory made macOS panic",
    "RANK_BACKEND": "tensors take RDMA (jaccl) where the file of RANK_HOSTS has rdma lists, else "
    "TCP (ring); mpi, which was for one machine, is gone",
    "RANK_PORT": "rank 0 waits at the port 100 above PROXY_PORT; hearth ranks join ADDRESS:PORT "
    "names it",
    "CACHE_DEBUG": "LOG_PROMPTS=true serves the token ids of recent prompts, where PROXY_API_KEY "
    "is set",
    "DEFAULT_REPETITION_CONTEXT_SIZE": "DEFAULT_REPETITION_PENALTY looks at the last 256 tokens",
    "WARM_PROMPTS": "what was read is on disk at the next start; POST /v1/cache/prefill reads and "
    "pins a prompt beforehand",
    "USE_KV_CACHE": 'requests read and write the cache unless they send "use_kv_cache": false; '
    "MAX_KV_SIZE_GB=0 keeps all of it off the disk",
}
# Defaults that older installers wrote into each .env. No user chose them: no warning for these.
FORMER_DEFAULTS: Final = {
    "CACHE_VLM_IMAGE_IDENTITY": "true",
    "SESSION_TITLES": "true",
    "MAX_IMAGE_PIXELS": "40000000",
    "VISION_CACHE_MB": "256",
    "CACHE_STORE_QUANT_MIN_TOKENS": "256",
    "EMBEDDING_IDLE_SECONDS": "300",
    "SHUTDOWN_FLUSH_SECONDS": "2",
    "KEEP_AWAKE": "true",
    "KV_DISK_STATE_BITS": "32",
    "WIRE": "weights",
    "RANK_BACKEND": "ring",
    "RANK_PORT": "4100",
    "CACHE_DEBUG": "false",
    "DEFAULT_REPETITION_CONTEXT_SIZE": "256",
    "WARM_PROMPTS": "",
    "USE_KV_CACHE": "true",
}
REFUSED: Final = {
    "NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT": (
        "it replaces what a tool wrote by a digest, so that the model is blinded; "
        "remove the line, the cache does not need it"
    ),
}
