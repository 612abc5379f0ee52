"""Reads the settings from the environment and `.env` into one frozen dataclass.

`Settings` lists each variable with its default, its parser and its purpose. No other code reads
`os.environ` for a setting. With an invalid value the server does not start, and the message names
the variable, the value and the allowed values. `.env.example` lists every variable with its
default; a test keeps it equal to this table.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from dotenv import dotenv_values

from hearth.shared.dropped_settings import DROPPED, FORMER_DEFAULTS, FORMER_MODEL, REFUSED
from hearth.shared.errors import StartError
from hearth.shared.listen_addresses import is_address, is_host_name, is_loopback
from hearth.shared.paths import DEFAULT_LOG_ROOT, PROJECT_DIR

DEFAULT_MODEL: Final = "builtin:smollm2"
# Limit of kept KV in all workers if CACHE_RAM_BUDGET_MB is 0 and the device recommends no memory
# limit. On other devices the limit follows the memory (worker/setup/memory_setup.py).
CACHE_RAM_MB_UNKNOWN: Final = 512
RANK_PORT_ABOVE: Final = 100  # distance of the rank port from PROXY_PORT
UNIFORM_BITS: Final = (0, 4, 8)  # 0 = off
LIKENESS_MIN: Final = 0.6  # likeness of a misspelt name and the suggested one
_FORMER_SOURCE: Final = re.compile(rf"(?<![^=,\s])builtin:{FORMER_MODEL}(?![^,\s])", re.IGNORECASE)


SettingParser = Callable[[str], Any]  # raises ValueError(what is allowed)


def _ranged(kind: type[Any], low: float, high: float, allowed: str) -> SettingParser:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not low <= value <= high:  # refuses NaN, too
            raise ValueError(allowed)
        return value

    return parse


def integer(low: int, high: int) -> SettingParser:
    return _ranged(int, low, high, f"a whole number from {low:,} to {high:,}")


def number(low: float, high: float) -> SettingParser:
    return _ranged(float, low, high, f"a number from {low:g} to {high:g}")


def auto_or(parser: SettingParser) -> SettingParser:
    """Also allow the word auto, which becomes None."""

    def parse(text: str) -> Any:
        try:
            return None if text.lower() == "auto" else parser(text)
        except ValueError as allowed:
            raise ValueError(f"auto, or {allowed}") from None

    return parse


def chosen(allowed: str, values: Mapping[str, Any]) -> SettingParser:
    """Allow the words in `values`, in any case."""

    def parse(text: str) -> Any:
        if text.lower() not in values:
            raise ValueError(allowed)
        return values[text.lower()]

    return parse


_BOOLEANS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
boolean = chosen("true or false", _BOOLEANS)
bits = chosen("off, 4 or 8", {"off": 0, "4": 4, "8": 8})  # bits of a quantised value; 0 = off
group_size = chosen("32, 64 or 128", {"32": 32, "64": 64, "128": 128})


def one_of(*allowed: str) -> SettingParser:
    return chosen("one of " + ", ".join(allowed), {word: word for word in allowed})


def idle_prefill(text: str) -> str:
    if text.lower() == "always":
        raise ValueError(
            "never or auto: always also read again what an answer had written; auto reads on mains "
            "power what the next request would have to"
        )
    return str(one_of("never", "auto")(text))


def stored_bits(text: str) -> float:
    """Parse the bits of stored KV; 0 = off. `_check_together` compares them with the scheme."""
    allowed = "off, 4 or 8; from 2 to 8 in steps of 0.5 with KV_QUANT_SCHEME=turboquant"
    if text.lower() == "off":
        return 0
    try:
        value = float(text)
    except ValueError:
        raise ValueError(allowed) from None
    if not 2 <= value <= 8 or not (2 * value).is_integer():
        raise ValueError(allowed)
    return value


def required_text(text: str) -> str:
    if not text:
        raise ValueError("not empty")
    return text


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def named_sources(text: str) -> tuple[tuple[str, str], ...]:
    """Parse pairs of a name and its path or hub id."""
    pairs = [tuple(part.strip() for part in word.split("=", 1)) for word in words(text)]
    names = [pair[0] for pair in pairs]
    if any(len(pair) != 2 or not all(pair) for pair in pairs) or len({*names}) < len(names):
        raise ValueError("name=directory or name=hub id, with commas between them, each name once")
    if not all(name.isascii() and name.isprintable() for name in names):
        raise ValueError("names of plain ASCII")
    return tuple((pair[0], pair[1]) for pair in pairs)


def api_keys(text: str) -> tuple[str, ...]:
    """Parse API keys; a list of commas alone is refused, since it would leave the server open."""
    if text and not words(text):
        raise ValueError("keys with commas between them, or nothing")
    return words(text)


def path(text: str) -> Path:
    if not text:
        raise ValueError("a directory")
    try:
        return PROJECT_DIR / Path(text).expanduser()
    except RuntimeError:
        raise ValueError("a directory; behind ~ may stand / or a user of this machine") from None


def optional_file(text: str) -> Path | None:
    return path(text) if text else None


def log_directory(text: str) -> Path:
    return path(text) if text else DEFAULT_LOG_ROOT


def listen_host(text: str) -> str:
    if not is_address(text) and not is_host_name(text):
        raise ValueError("an IP address, localhost or a name of this machine")
    return text


def _setting(name: str, default: str, parse: SettingParser, about: str) -> Any:
    """Declare a field that is read from variable `name`; `about` describes it in `.env.example`."""
    return dataclasses.field(
        metadata={"name": name, "default": default, "parse": parse, "about": about}
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, in the order of `.env.example`."""

    model_path: str = _setting(
        "MODEL_PATH",
        DEFAULT_MODEL,
        required_text,
        "Hub id, directory or name of the model (hearth models); builtin:smollm2 needs no hub",
    )
    proxy_model_id: str = _setting(
        "PROXY_MODEL_ID",
        "",
        str,
        "Public model name; empty = the hub id or the directory's name",
    )
    model_aliases: tuple[str, ...] = _setting(
        "MODEL_ALIASES", "", words, "Further names for the model, comma-separated"
    )
    catch_all_models: tuple[str, ...] = _setting(
        "CATCH_ALL_MODELS",
        "claude-*, gpt-*",
        words,
        "Patterns of model names that are served by the model too",
    )
    proxy_host: str = _setting(
        "PROXY_HOST",
        "127.0.0.1",
        listen_host,
        "Address to listen on, or a name, of which all addresses are; any but loopback needs "
        "PROXY_API_KEY",
    )
    proxy_port: int = _setting("PROXY_PORT", "4000", integer(1, 65535), "Port to listen on")
    proxy_api_key: str = _setting(
        "PROXY_API_KEY",
        "",
        str,
        "Key that every client must send; empty = none, loopback only",
    )
    proxy_api_keys: tuple[str, ...] = _setting(
        "PROXY_API_KEYS",
        "",
        api_keys,
        "Further keys, comma-separated; what is remembered of one is not there for another",
    )
    litellm_config: Path | None = _setting(
        "LITELLM_CONFIG",
        "",
        optional_file,
        "A LiteLLM config.yaml with cloud models, other servers, fallbacks, budgets; empty = none, "
        "and nothing leaves this machine",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        "ALLOWED_HOSTS",
        "",
        words,
        "Names that it is served under where no key is asked for, as mac.local, *.local or "
        "host.docker.internal, comma-separated",
    )
    cors_origins: tuple[str, ...] = _setting(
        "CORS_ORIGINS",
        "",
        words,
        "Web origins that may use the API from a browser, as http://localhost:* or app://*, "
        "comma-separated",
    )
    workers: int = _setting(
        "WORKERS",
        "1",
        integer(0, 16),
        "Workers to start, each with its own copy of the model",
    )
    ranks: int = _setting(
        "RANKS",
        "1",
        integer(1, 16),
        "Processes, on this machine or on several, that compute one model together",
    )
    rank_hosts: Path | None = _setting(
        "RANK_HOSTS",
        "",
        optional_file,
        "File of the machines of the ranks, as mlx.launch reads it; empty = all on this machine",
    )
    rank_split: str = _setting(
        "RANK_SPLIT",
        "tensor",
        one_of("tensor", "pipeline"),
        "What each rank has of the model: a part of every layer, or (pipeline) some of the layers",
    )
    run_dir: Path = _setting(
        "RUN_DIR", "~/.hearth/run", path, "Directory for sockets and the pid file (0700)"
    )
    kv_cache_dir: Path = _setting(
        "KV_CACHE_DIR", "~/.hearth/kv", path, "Directory of kept KV and turns (0700)"
    )
    max_kv_size_gb: int | None = _setting(
        "MAX_KV_SIZE_GB",
        "auto",
        auto_or(integer(0, 10_000)),
        "Kept KV on disk; auto = a tenth of the volume, if it is free; 0 = nothing is written",
    )
    kv_disk_write_gb_per_day: int = _setting(
        "KV_DISK_WRITE_GB_PER_DAY",
        "200",
        integer(0, 100_000),
        "KV written to disk a day, all workers together; 0 = no limit",
    )
    generation_watchdog_seconds: int = _setting(
        "GENERATION_WATCHDOG_SECONDS",
        "600",
        integer(0, 86_400),
        "Longest time to generate one answer, from its first token on; 0 = no limit",
    )
    stall_seconds: int = _setting(
        "STALL_SECONDS",
        "120",
        integer(0, 86_400),
        "A request, or a worker, that gets no step further for so long is ended; 0 = never; on a "
        "CPU one that computes has ten times what its measured speed tells",
    )
    memory_limit_mb: int = _setting(
        "MEMORY_LIMIT_MB",
        "0",
        integer(0, 16_777_216),
        "What all workers of a machine may take, weights included; 0 = what the device recommends, "
        "or RAM less a reserve of 8 GB or a quarter",
    )
    models: tuple[str, ...] = _setting(
        "MODELS",
        "",
        words,
        "Further models, as in MODEL_PATH, that a request may name; loaded in the other's place",
    )
    model_idle_unload_seconds: int = _setting(
        "MODEL_IDLE_UNLOAD_SECONDS",
        "0",
        integer(0, 31_536_000),
        "A model unused for so long is unloaded until the next request; 0 = never",
    )
    worker_endpoints: tuple[str, ...] = _setting(
        "WORKER_ENDPOINTS",
        "",
        words,
        "Workers on other machines, as tcp://address:port, comma-separated",
    )
    allow_model_code: tuple[str, ...] = _setting(
        "ALLOW_MODEL_CODE",
        "",
        words,
        "Models, as in MODEL_PATH, whose own Python code may run here; comma-separated",
    )
    allow_image_urls: bool = _setting(
        "ALLOW_IMAGE_URLS",
        "false",
        boolean,
        "Fetch the http(s) images that requests name, from public addresses only",
    )
    curve_keys_dir: Path = _setting(
        "CURVE_KEYS_DIR",
        "~/.hearth/keys",
        path,
        "Directory of the keys that workers on tcp:// need; hearth keys makes them",
    )
    log_level: str = _setting(
        "LOG_LEVEL",
        "INFO",
        one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error",
    )
    enable_request_logging: bool = _setting(
        "ENABLE_REQUEST_LOGGING",
        "true",
        boolean,
        "Write a cache trace per day and session under LOG_ROOT; no text of prompts",
    )
    log_root: Path = _setting(
        "LOG_ROOT",
        "~/.hearth/logs",
        log_directory,
        "Directory of the cache traces (0700); empty = ~/.hearth/logs",
    )
    log_prompts: bool = _setting(
        "LOG_PROMPTS",
        "false",
        boolean,
        "Also log snippets of prompts where a prefix broke; with PROXY_API_KEY serve token ids of "
        "recent prompts at /v1/cache/prompts",
    )
    max_kv_size: int = _setting(
        "MAX_KV_SIZE",
        "196608",
        integer(256, 16_777_216),
        "Longest prompt and completion together, in tokens",
    )
    prefill_chunk: int = _setting(
        "PREFILL_CHUNK",
        "0",
        integer(0, 16_384),
        "Prompt tokens in one forward; 0 = by model and chip, or what DOCTOR found better",
    )
    dtype: str = _setting(
        "DTYPE",
        "auto",
        one_of("auto", "bfloat16", "float16"),
        "What bfloat16 weights are computed in; auto = float16 on M1 and M2 where checked as good; "
        "on a CPU dense float32, of all weights, where that fits into half of the free memory",
    )
    live_slots_max: int = _setting(
        "LIVE_SLOTS_MAX",
        "0",
        integer(0, 64),
        "Live caches that one worker holds, idle ones included; 0 = one for each that may compute",
    )
    max_concurrent_requests: int = _setting(
        "MAX_CONCURRENT_REQUESTS",
        "0",
        integer(0, 64),
        "Requests that compute at once in one worker, where their KV has room; 0 = 32, or 4 where "
        "sequences share no forward; never more than LIVE_SLOTS_MAX",
    )
    queue_max: int = _setting(
        "QUEUE_MAX",
        "64",
        integer(1, 10_000),
        "Requests that may wait in one worker; more get a 503",
    )
    cache_ram_budget_mb: int = _setting(
        "CACHE_RAM_BUDGET_MB",
        "0",
        integer(0, 4_194_304),
        "Kept KV beside live caches, in MB; 0 = half to three quarters of what the model leaves of "
        f"this worker's memory (at most {CACHE_RAM_MB_UNKNOWN} on a CPU)",
    )
    cache_exact: str = _setting(
        "CACHE_EXACT",
        "auto",
        one_of("auto", "true", "false"),
        "Reuse only KV that a cold run would have made to the bit; auto = where it shows",
    )
    doctor: str = _setting(
        "DOCTOR",
        "auto",
        one_of("auto", "off"),
        "auto = check a new model on this machine once, in idle time, for what auto means; or off",
    )
    idle_prefill: str = _setting(
        "IDLE_PREFILL",
        "auto",
        idle_prefill,
        "Read in idle time: auto = on mains power, what the next request would have to read; "
        "or never",
    )
    prompt_cache_ttl_seconds: int = _setting(
        "PROMPT_CACHE_TTL_SECONDS",
        "1800",
        integer(0, 31_536_000),
        "KV unused for so long leaves the memory of an idle server, not its disk; 0 = never",
    )
    prompt_cache_session_max_idle_seconds: int = _setting(
        "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS",
        "1800",
        integer(0, 31_536_000),
        "A live cache or a session unused for so long is given up; its KV is kept; 0 = never",
    )
    prompt_cache_max_entries_per_session: int = _setting(
        "PROMPT_CACHE_MAX_ENTRIES_PER_SESSION",
        "0",
        integer(0, 100_000),
        "Conversations remembered of one session (main line, sub-agents, branches); 0 = no cap",
    )
    cache_canonicalize_tool_context: bool = _setting(
        "CACHE_CANONICALIZE_TOOL_CONTEXT",
        "true",
        boolean,
        "Recognise a conversation although its volatile fields (dates, ids, counters) changed",
    )
    cache_norm_safety_check: bool = _setting(
        "CACHE_NORM_SAFETY_CHECK",
        "false",
        boolean,
        "Recognise a conversation by its exact text where the rules leave out over 10 % of it",
    )
    preserve_thinking: bool = _setting(
        "PRESERVE_THINKING",
        "true",
        boolean,
        "Keep the thinking of earlier turns, also where the model's template would drop it",
    )
    cache_store_bits: float = _setting(
        "CACHE_STORE_BITS",
        "off",
        stored_bits,
        "Bits of KV that is stored from now on, in memory and on disk: off, 4 or 8",
    )
    kv_quant_scheme: str = _setting(
        "KV_QUANT_SCHEME",
        "uniform",
        one_of("uniform", "turboquant"),
        "How stored KV is packed: uniform, or turboquant (of mlx-vlm; 2 to 8 bits in steps of 0.5)",
    )
    kv_bits: int = _setting(
        "KV_BITS",
        "OFF",
        bits,
        "Bits of KV in live caches: off, 4 or 8, where the model allows",
    )
    kv_group_size: int = _setting(
        "KV_GROUP_SIZE", "64", group_size, "Elements of quantised KV that share a scale"
    )
    quantized_kv_start: int = _setting(
        "QUANTIZED_KV_START",
        "5000",
        integer(0, 16_777_216),
        "Tokens from which on a live cache is quantised",
    )
    speculate: str = _setting(
        "SPECULATE",
        "auto",
        one_of("auto", "off", "forced", "lookup"),
        "Draft tokens and verify several in one forward: auto = where DOCTOR found that right and "
        "cheap; forced = what a grammar forces only; lookup = from text too, unchecked; or off",
    )
    draft_model: str = _setting(
        "DRAFT_MODEL",
        "",
        str,
        "Hub id or directory of an MTP head or an assistant that drafts too, where SPECULATE "
        "drafts from text; empty = none",
    )
    adapters: tuple[tuple[str, str], ...] = _setting(
        "ADAPTERS",
        "",
        named_sources,
        "LoRA adapters of the model, name=directory or hub id, with commas between; a request that "
        "names one as its model has it; empty = none",
    )
    embedding_model: str = _setting(
        "EMBEDDING_MODEL",
        "",
        str,
        "Hub id, directory or name of the model that /v1/embeddings is answered by, in a process "
        "of its own; builtin:minilm needs no hub; empty = none",
    )
    rerank_model: str = _setting(
        "RERANK_MODEL",
        "",
        str,
        "Hub id, directory or name of the model that /v1/rerank is answered by, in the same "
        "process; empty = none",
    )
    default_temperature: float | None = _setting(
        "DEFAULT_TEMPERATURE",
        "auto",
        auto_or(number(0, 2)),
        "Sampling temperature; 0 = greedy, auto = as the model's generation_config.json has it, or "
        "0.1",
    )
    default_top_p: float | None = _setting(
        "DEFAULT_TOP_P",
        "auto",
        auto_or(number(0, 1)),
        "Nucleus sampling; 1 = off, auto = as the model's makers have it, or 0.9",
    )
    default_top_k: int | None = _setting(
        "DEFAULT_TOP_K",
        "auto",
        auto_or(integer(0, 1_000_000)),
        "Sample from the k likeliest; 0 = off, auto = as the model's makers have it, or 40",
    )
    default_min_p: float | None = _setting(
        "DEFAULT_MIN_P",
        "auto",
        auto_or(number(0, 1)),
        "Drop tokens less likely than this share of the likeliest; auto = as the model's makers "
        "have it, or 0.05",
    )
    default_repetition_penalty: float = _setting(
        "DEFAULT_REPETITION_PENALTY",
        "1",
        number(0.01, 10),
        "Divides the logits of recent tokens; 1 = off",
    )
    default_max_tokens: int = _setting(
        "DEFAULT_MAX_TOKENS",
        "2048",
        integer(1, 16_777_216),
        "Completion limit where the client names none",
    )
    default_thinking: bool | None = _setting(
        "DEFAULT_THINKING",
        "auto",
        chosen("true or false", _BOOLEANS | {"auto": None}),
        "Whether models that can think do so unless told otherwise; auto = as their makers have it",
    )

    @property
    def model_name(self) -> str:
        """The name clients see first in /v1/models."""
        return self.proxy_model_id or public_name(self.model_path)

    @property
    def embedding_name(self) -> str:
        """The public name of EMBEDDING_MODEL; "" = not set."""
        return public_name(self.embedding_model) if self.embedding_model else ""

    @property
    def rerank_name(self) -> str:
        """The public name of RERANK_MODEL; "" = not set."""
        return public_name(self.rerank_model) if self.rerank_model else ""

    @property
    def api_keys(self) -> tuple[str, ...]:
        """All accepted API keys; if there are none, requests need no key."""
        keys = (self.proxy_api_key, *self.proxy_api_keys)
        return tuple(key for key in dict.fromkeys(keys) if key)

    @property
    def serves_prompts(self) -> bool:
        """Whether clients may read the token ids of their key's recent prompts."""
        return self.log_prompts and bool(self.api_keys)

    @property
    def instance_dir(self) -> Path:
        """The directory of this server's sockets and pid file, one per port."""
        return self.run_dir / str(self.proxy_port)

    @property
    def rank_port(self) -> int:
        """The port on which rank 0 waits for ranks on other machines."""
        above = self.proxy_port + RANK_PORT_ABOVE
        return above if above <= 65535 else self.proxy_port - RANK_PORT_ABOVE

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.proxy_host)


def public_name(model_path: str) -> str:
    """Return the default public name of the model at `model_path`."""
    if model_path.startswith("builtin:"):
        return model_path.removeprefix("builtin:")
    try:
        path = Path(model_path).expanduser()
        return path.resolve().name if path.exists() else model_path
    except (OSError, RuntimeError):  # loading the model reports the error
        return model_path


assert set(get_type_hints(Settings)) == {row.name for row in dataclasses.fields(Settings)}
NAMES: Final = tuple(row.metadata["name"] for row in dataclasses.fields(Settings))


def load_settings(environ: Mapping[str, str], env_file: Path | None) -> Settings:
    """Return the settings of `env_file` (if it exists), overridden by `environ`.

    Raises:
        StartError: a value is not allowed, or values do not go together.
    """
    from_file = variables_in(env_file)
    given = {**from_file, **environ}
    for name, reason in REFUSED.items():
        if given.get(name, "").lower() not in ("", "false", "0", "no", "off"):
            raise StartError(f"{name} is refused: {reason}.")
    values = {}
    for field in dataclasses.fields(Settings):
        variable = field.metadata
        text = given.get(variable["name"], variable["default"]).strip()
        text = _without_former_model(variable["name"], text)
        try:
            values[field.name] = variable["parse"](text)
        except ValueError as error:
            raise StartError(f"{variable['name']} is {text!r}; allowed is {error}.") from None
    settings = Settings(**values)
    _check_together(settings)
    # With a LiteLLM config the keys may be LiteLLM's, which proxy/gateway checks.
    if not settings.is_loopback and not settings.api_keys and settings.litellm_config is None:
        raise StartError(
            f"PROXY_HOST is {settings.proxy_host}, which others can reach, and PROXY_API_KEY is "
            "empty. Set PROXY_API_KEY, or PROXY_HOST=127.0.0.1."
        )
    return settings


def setting_warnings(
    environ: Mapping[str, str], env_file: Path | None, read: Collection[str] = ()
) -> list[str]:
    """Return a warning for each variable that has no effect or names the former model.

    `read` names variables of the file that other code reads. A dropped setting at its former
    default in the file causes no warning. An unknown name causes a warning only in the file: the
    environment also holds other programs' variables. No warning shows a value.
    """
    from_file = variables_in(env_file)
    in_file = [
        name
        for name, text in from_file.items()
        if name not in read and text != FORMER_DEFAULTS.get(name)
    ]
    warnings = [
        f"{name} names builtin:{FORMER_MODEL}, which is gone: {DEFAULT_MODEL} is served in its "
        f"place. Write {DEFAULT_MODEL} there, or another model."
        for name, text in {**from_file, **environ}.items()
        if _without_former_model(name, text) != text
    ]
    effects = {name: f"has no effect: {reason}" for name, reason in DROPPED.items()}
    for name, reason in REFUSED.items():
        effects[name] = f"has no effect; true is refused: {reason}"
    warnings += [
        f"{name} is set and {effect}."
        for name, effect in effects.items()
        if name in in_file or name in environ
    ]
    for name in in_file:
        if name not in NAMES and name not in effects:
            meant = difflib.get_close_matches(name.upper(), NAMES, 1, LIKENESS_MIN)
            hint = f"Is {meant[0]} meant?" if meant else "docs/settings.md lists those that are."
            warnings.append(f"{name} in the settings file is not read. {hint}")
    return warnings


def _without_former_model(name: str, text: str) -> str:
    """Return `text`, the value of setting `name`, with the former model's name replaced."""
    names_models = name in ("MODEL_PATH", "MODELS")
    return _FORMER_SOURCE.sub(DEFAULT_MODEL, text) if names_models else text


def variables_in(env_file: Path | None) -> dict[str, str]:
    """Return the variables in the file; {} without a file, "" for a name without a value.

    Raises:
        StartError: the file exists but cannot be read. Ignoring it would start the server with
            other settings than the user wrote, and without API keys.
    """
    if env_file is None or not os.path.lexists(env_file):
        return {}
    try:
        with env_file.open(encoding="utf-8") as file:
            values = dotenv_values(stream=file)
    except OSError as error:
        raise StartError(
            f"The settings file {env_file} cannot be read ({error.strerror}). Make it a file that "
            "you can read, or remove it."
        ) from None
    except UnicodeDecodeError as error:
        raise StartError(
            f"The settings file {env_file} is no UTF-8 (byte {error.start:,}). Save it as UTF-8."
        ) from None
    return {name: text or "" for name, text in values.items()}


def _check_together(settings: Settings) -> None:
    """Raise StartError if two settings exclude each other."""
    if not settings.workers and not settings.worker_endpoints:
        raise StartError("WORKERS is 0 and WORKER_ENDPOINTS is empty. Set one of them.")
    if settings.ranks > 1 and settings.rank_hosts is not None and settings.workers > 1:
        raise StartError(
            f"WORKERS is {settings.workers} and RANK_HOSTS names machines, whose ranks serve one "
            "worker. Set WORKERS=1."
        )
    if settings.cache_exact == "true" and settings.cache_store_bits:
        raise StartError(
            f"CACHE_EXACT is true and CACHE_STORE_BITS is {settings.cache_store_bits:g}: KV that "
            "was stored quantised is not exact. Set CACHE_STORE_BITS=off, or CACHE_EXACT=false."
        )
    # KV_QUANT_SCHEME packs stored KV to CACHE_STORE_BITS.
    bits, scheme = settings.cache_store_bits, settings.kv_quant_scheme
    if scheme == "uniform" and bits not in UNIFORM_BITS:
        raise StartError(
            f"CACHE_STORE_BITS is {bits:g} and KV_QUANT_SCHEME is uniform, which packs in 4 or 8 "
            "bits. Set CACHE_STORE_BITS=4, or KV_QUANT_SCHEME=turboquant."
        )
    if scheme == "turboquant" and not bits:
        raise StartError(
            "KV_QUANT_SCHEME is turboquant and CACHE_STORE_BITS is off, so that nothing would be "
            "packed by it: live caches (KV_BITS) are packed uniformly. Set CACHE_STORE_BITS=4, or "
            "KV_QUANT_SCHEME=uniform."
        )
