"""Defines every message between proxy and worker, and nothing else.

A frame is one msgpack map: {"kind": class name, field: value, ...}. Whoever changes a message
increments PROTOCOL_VERSION; both sides compare the version once, in Hello and Welcome.
Every request ends in exactly one answer: Submit in Finished, Count in Counted, Status in Told,
Embed in Embedded and Rerank in Reranked, or each of them in Failed. Embed and Rerank go only to the
worker that embeds and ranks.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgpack

from hearth.shared.errors import WireError

THINKING_LEVELS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")  # least first
# (variable, value for on, value for off) in chat templates; enable_thinking and thinking first.
TEMPLATE_SWITCHES: Final[tuple[tuple[str, Any, Any], ...]] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),  # Kimi K3, Granite 3.3
    ("thinking_mode", "enabled", "disabled"),  # MiniMax M3
    ("thinking_mode", "thinking", "chat"),  # DeepSeek's encoders, which are Python functions
    ("reasoning", True, False),  # Cohere 2 MoE, GigaChat 3.5
    ("thinking_option", "on", "off"),  # Ling
    ("thinking_budget", -1, 0),  # Seed-OSS
)


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """How much the model may think, in the client's terms; the worker maps it to its template.

    A level without `on` sets the effort, not whether the model thinks.
    """

    on: bool | None = None
    level: str | None = None  # one of THINKING_LEVELS
    budget: int | None = None  # tokens, >= 0

    @property
    def options(self) -> dict[str, Any]:
        """The request fields in which a client expresses the same wish."""
        level = {"effort": self.level} if self.on is None else self.level
        name = "output_config" if self.on is None else "reasoning_effort"
        options = (
            ("enable_thinking", self.on),
            (name, self.level and level),
            ("thinking_budget", self.budget),
        )
        return {option: value for option, value in options if value is not None}


@dataclass(frozen=True, slots=True)
class ThinkingFacts:
    """The thinking options of a model's template, and its behaviour without a wish."""

    # "on" | "off" | "adaptive" (the model decides); without a switch also "always" | "never"
    default: str = "never"
    has_switch: bool = False  # whether thinking can be turned on and off
    levels: list[str] = field(default_factory=list)  # some of THINKING_LEVELS, least first


PROTOCOL_VERSION: Final = 19
FRAME_BYTES_MAX: Final = 80 * 1024 * 1024  # a request body of 64 MB and its envelope


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are sampled and when an answer ends. None = the worker's setting."""

    temperature: float | None = None  # 0 = greedy
    top_p: float | None = None
    top_k: int | None = None  # 0 = off
    min_p: float | None = None
    repetition_penalty: float | None = None  # 1 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # completion limit, >= 1
    stop: list[str] = field(default_factory=list)
    logit_bias: dict[str, float] = field(default_factory=dict)  # token id in decimal -> bias
    top_logprobs: int | None = None  # None = no logprobs, else how many alternatives, 0..20
    speculate: bool | None = None  # whether tokens are drafted and verified


@dataclass(frozen=True, slots=True)
class Constraints:
    """The form that the answer must have."""

    tool_choice: str = "auto"  # "auto" | "none" | "required": one call at least
    tool_names: list[str] = field(default_factory=list)  # tools that may be called; empty = all
    parallel_calls: bool = True  # False = one call at most
    is_json: bool = False  # the answer is one JSON value, an object where `schema` is None
    schema: dict[str, Any] | None = None  # JSON schema of the answer
    thinking_budget: int | None = None  # tokens after which the think block is closed


@dataclass(frozen=True, slots=True)
class Speaker:
    """The caller of a request. Fields that the client does not send are empty."""

    key: str = ""  # digest of the API key
    session: str = ""
    agent: str = ""  # id of a sub-agent inside the session
    parent: str = ""  # the session that started this one
    client: str = field(default="", compare=False)  # the program: "claude-code", "opencode"
    client_name: str = field(default="", compare=False)  # for people: "Claude Code 2.1"
    conversation: str = field(default="", compare=False)  # substitute for an empty `session`
    title: str = field(default="", compare=False, repr=False)  # first words; in memory only

    @property
    def label(self) -> str:
        """The name of the session in reports: the client's own, or the best substitute."""
        return self.session or self.conversation or self.client or "anonymous"


@dataclass(frozen=True, slots=True)
class MessageName:
    """The digests that identify one message. They never change what the model is fed."""

    canonical: bytes  # digest of the message's canonical form; b"" if the form is empty
    exact: bytes  # digest of the message as the model sees it
    rules: list[str] = field(default_factory=list)  # rules that made the canonical form
    link: bytes = b""  # digest of all canonical messages up to this one


START: Final = b""  # the link before the first message


def linked(names: Iterable[MessageName], link: bytes = START) -> list[MessageName]:
    """Return `names` with their links; `link` is the link of the message before them.

    The proxy computes links once, when it parses a request. Conversations are found by comparing
    links. A message with an empty canonical form does not change the link.
    """
    found = []
    for name in names:
        if name.canonical:
            link = hashlib.blake2b(link + name.canonical, digest_size=16).digest()
        found.append(MessageName(name.canonical, name.exact, name.rules, link))
    return found


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before rendering, the same for all API dialects.

    A message is {role, content, reasoning_content, tool_calls, tool_call_id, name}. Its content is
    a string, or, with images or several texts, an ordered list of {"type": "text", "text"} and
    {"type": "image", "image": a key of `images`}.
    Two fields are not for templates: an assistant's `signatures` (of thinking that this server may
    have issued) and a tool result's `tool_references` (names of deferred tools that it loads).
    If `continues` is set, the last message is an assistant's text, and the answer continues it.
    A raw prompt has no messages; it is `text` or the token ids `ids`, unchanged.
    """

    messages: list[Any]
    tools: list[Any] = field(default_factory=list)  # {"type": "function", "function": {...}}
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # the client's values, as sent
    deferred: list[Any] = field(default_factory=list)  # tools shown only after they are loaded
    speaker: Speaker = field(default_factory=Speaker)
    names: list[MessageName] = field(default_factory=list)  # one per message, or none at all
    delta_chars: int = 0  # characters that the canonical form leaves out
    text: str | None = None
    ids: list[int] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)  # digest -> file as received
    places: dict[str, str] = field(default_factory=dict)  # digest -> first field with the image
    continues: bool = False
    thinking: ThinkingWish = field(default_factory=ThinkingWish)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a worker knows about its loaded model."""

    name: str  # the public model name
    path: str
    architecture: str  # model_type of config.json
    context_tokens: int  # prompt and completion together
    vocab_size: int
    parameter_count: int
    weight_bytes: int
    cache_layout: str  # e.g. "4 x KVCache"
    backend: str  # "metal", "cuda" or "cpu"
    takes_images: bool = False
    model_tokens: int = 0  # the context that the model was trained for
    context_by: str = "model"  # the tightest limit: "model" | "setting" | "memory"
    thinking: ThinkingFacts = field(default_factory=ThinkingFacts)
    ranks: int = 1  # processes that compute the model together
    computed_in: str = ""  # in words: "dense float32, made from 4 bits: 0.5 GB"
    tables: str = ""  # in words, the weights that stay on the SSD; weight_bytes has the others


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """What a worker knows about a loaded model that embeds or ranks."""

    architecture: str  # model_type of config.json
    tokens_max: int  # limit of one text, or of a query and a document together
    weight_bytes: int
    dimensions: int = 0  # length of a vector; 0 = the model ranks
    pooling: str = ""  # "mean", "cls", "lasttoken" or "max"; "" = the model ranks


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a request, in tokens and milliseconds."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens served from kept KV, <= prompt_tokens
    prefilled_tokens: int  # prompt tokens computed for this request before its first token
    completion_tokens: int  # sampled tokens, including the end-of-turn token
    reasoning_tokens: int = 0
    source: str = "none"  # where cached_tokens came from: slot | ram | ssd | none
    ttft_ms: int = 0  # time from Submit's receipt to the first token
    finish_ms: int = 0  # time from Submit's receipt to the last token
    divergence: dict[str, Any] | None = None  # tokens lost in the cache, and why
    image_tokens: int = 0  # part of prompt_tokens that stands for images
    queue_ms: int = 0  # time before the request had a slot; part of ttft_ms
    match: str = "none"  # relation of the prompt to the cache: exact | prefix | lcp ...
    session_kind: str = "none"  # main | agent | side; none = no session
    image_ms: int = 0  # time for this request in the image encoder, after Submit's receipt
    matched_tokens: int = 0  # prompt tokens found in the cache at all, >= cached_tokens
    canonical_tokens: int = 0  # part of cached_tokens that is canonical KV
    idle_tokens: int = 0  # tokens of the session that were read earlier, in idle time
    accepted_prediction_tokens: int = 0  # drafted tokens that the model confirmed
    rejected_prediction_tokens: int = 0  # drafted tokens that the model rejected
    decode_forwards: int = 0  # forwards that computed the answer's tokens, <= completion_tokens
    warnings: list[str] = field(default_factory=list)  # sentences about unfulfilled options


# ---------------------------------------------------------------- proxy to worker


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame on a connection. Answered by Welcome."""

    protocol_version: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Asks for an answer. Answered by Admitted, Progress*, Delta*, then Finished; or by Failed.

    The lease begins with the receipt, and Renew extends it. A request with an expired lease is
    cancelled, because its proxy or its client is gone.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling
    constraints: Constraints = field(default_factory=Constraints)
    use_kv_cache: bool = True  # whether the cache and the remembered turns are used
    prefill_only: bool = False  # end before the first token, with `reason` "prefilled"
    pin: bool = False  # whether the prompt's KV is protected from eviction
    prediction: str = ""  # the client's guess of the answer's text
    adapter: str = ""  # name from ADAPTERS that the model uses; "" = none


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a request whose client left. Unknown ids are ignored: the answer may be on its way."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Extends the leases of requests whose clients are still connected."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class TokenQuery:
    """What a Count returns, and how a raw prompt is tokenised."""

    tells: str = "count"  # the result besides the count: "ids" | "pieces" | "text"
    adds_header: bool = True  # messages: whether the generation prompt counts
    adds_beginning: bool = True  # raw text: whether the tokenizer's begin token counts
    reads_controls: bool = True  # raw text: whether spelt-out control tokens count as such


@dataclass(frozen=True, slots=True)
class Count:
    """Asks how many tokens a prompt has, and which. Answered by Counted or Failed.

    The prompt may exceed the context, and a raw prompt may be empty: it is not computed.
    """

    request_id: str
    prompt: Prompt
    query: TokenQuery = field(default_factory=TokenQuery)


@dataclass(frozen=True, slots=True)
class Status:
    """Asks about the cache, empties it, or releases a pin. Answered by Told or Failed."""

    request_id: str
    # "cache" | "clear_cache" | "unpin" | "prompt" | "sessions" | "session" | "tree";
    # "doctor" | "check_again": results of the model checks; the latter runs the checks again
    what: str
    about: str = ""  # request id of a prompt or a pin, or a session
    key: str = ""  # digest of the API key whose data is meant; "" = all keys


@dataclass(frozen=True, slots=True)
class Embed:
    """Asks for a vector per text; has a lease, like Submit. Answered by Embedded or Failed."""

    request_id: str
    texts: list[Any]  # texts, or lists of token ids
    dimensions: int | None  # length of a vector; None = the model's
    truncate: bool  # whether a text that is too long is cut instead of refused


@dataclass(frozen=True, slots=True)
class Rerank:
    """Asks for a score of each document against the query. Answered by Reranked or Failed.

    A document that is too long is cut.
    """

    request_id: str
    query: str
    documents: list[str]


@dataclass(frozen=True, slots=True)
class ShortTurns:
    """Says whether answers stream now. If so, the embedding worker computes in short forwards."""

    are_wanted: bool


# ---------------------------------------------------------------- worker to proxy


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello. `boot_id` differs for each start of a worker."""

    protocol_version: int
    worker_id: int
    boot_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent each second to every peer that sent Hello, by a thread that never waits for the GPU."""

    state: str  # "loading" | "ready"
    running: int  # requests that hold a cache
    waiting: int  # requests that do not hold a cache yet
    steps: int  # scheduler steps so far; if they stop while requests run, the worker is stuck
    active_bytes: int  # memory in use: MLX's arrays and the rest of the process
    model: ModelFacts | None
    wait_s: float = 0.0  # estimated wait of a new request for a cache
    queue: list[str] = field(default_factory=list)  # ids of the first waiting requests, in order
    step: str = ""  # step of the start: "weights", "cache"; "" once the worker is ready
    step_s: float = 0.0  # seconds in this step so far
    step_bytes: int = 0  # bytes that the step loads, if known
    held_bytes: int = 0  # bytes loaded so far
    requests_max: int = 0  # limit of requests in the worker; further ones are refused
    cpu_s: float = 0.0  # CPU seconds of a process without a GPU; 0 = a GPU computes
    prefill_tokens_per_s: float = 0.0  # measured prefill speed; 0 = no prefill yet
    reading_tokens: int = 0  # tokens in the prefill forward that runs now
    encoders: dict[str, EncoderFacts] = field(default_factory=dict)  # by "embeddings" | "rerank"


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is accepted and will end in Finished (or in Failed, if the worker breaks).

    Sent once the prompt is rendered, also while the model computes other requests.
    """

    request_id: str
    prompt_tokens: int
    signature: str = ""  # signature of the thinking that follows; the client sends it back


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports that `done_tokens` of the prompt are in the KV cache.

    The first message counts the tokens kept from earlier requests; then one follows for each chunk.
    The count falls if kept KV was lost before the prefill began.
    """

    request_id: str
    done_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token's log probability, with the likeliest alternatives."""

    token_id: int
    token: str  # text of the token; U+FFFD for a partial character, unlike in Delta.text
    token_bytes: bytes
    logprob: float
    top: list[list[Any]]  # [token_id, text, bytes, logprob], most likely first


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    id: str  # the model's id if it has only letters, digits, - and _; else a new one
    name: str


@dataclass(frozen=True, slots=True)
class Delta:
    """Text to append. `seq` counts 0, 1, 2... within a request, so that a lost frame is noticed.

    On the channel "tool_call" the text is the next piece of JSON arguments of the call that `call`
    began last. The pieces of a call form one JSON object, unless the answer was cut off.
    """

    request_id: str
    seq: int
    channel: str  # "content" | "reasoning" | "tool_call"
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    call: CallStart | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Ends a request that ran."""

    request_id: str
    reason: str  # "stop" | "length" | "tool_calls" | "cancelled" | "prefilled"
    stop_sequence: str | None  # the client's stop string that ended the answer
    usage: Usage

    @property
    def is_cut(self) -> bool:
        """Whether the answer was cut off, perhaps inside a call."""
        return self.reason == "length" or self.stop_sequence is not None


@dataclass(frozen=True, slots=True)
class Failed:
    """Ends a request that did not run to its end."""

    request_id: str
    status: int
    code: str
    text: str
    retry_after_s: int | None = None  # delay until the request may succeed; None = unknown
    param: str | None = None  # the wrong field of the client's request


@dataclass(frozen=True, slots=True)
class Counted:
    """Answers Count. Large fields are bytes, because decoding lists would block the event loop."""

    request_id: str
    tokens: int
    ids: bytes = b""  # for "ids" and "pieces": uint32, little-endian
    pieces: bytes = b""  # for "pieces": the concatenated bytes of all tokens
    piece_ends: bytes = b""  # end of each token in `pieces`: uint32, little-endian
    text: str = ""  # for "text": the text of all tokens; an image is "[image]"


@dataclass(frozen=True, slots=True)
class Told:
    """Answers Status."""

    request_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Answers Embed: the vectors, and the token count of each text."""

    request_id: str
    vectors: bytes  # float32, little-endian, text by text, each normalised to length 1
    dimensions: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Reranked:
    """Answers Rerank: a score from 0 to 1 for each document."""

    request_id: str
    scores: list[float]
    tokens: int  # total over all documents, each with the query


Down = Hello | Submit | Cancel | Renew | Count | Status | Embed | Rerank | ShortTurns
Answer = Finished | Failed | Counted | Told | Embedded | Reranked  # each ends its request
Up = Welcome | Heartbeat | Admitted | Progress | Delta | Answer
Message = Down | Up

KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return the frame for `message`.

    Raises:
        WireError: a client's value cannot be encoded (an integer beyond 64 bits, a lone surrogate,
            nesting beyond msgpack's limit), or the frame exceeds FRAME_BYTES_MAX.
    """
    try:
        frame: bytes = msgpack.packb(
            {"kind": type(message).__name__, **_fields(message)}, default=_fields
        )
    except (OverflowError, ValueError, TypeError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"frame is {len(frame):,} bytes; the limit is {FRAME_BYTES_MAX:,}")
    return frame


def decode(frame: bytes) -> Message:
    """Return the message in `frame`.

    Raises:
        WireError: the bytes are not exactly one known message with fields of the right types.
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"frame is {len(frame):,} bytes; the limit is {FRAME_BYTES_MAX:,}")
    try:
        fields = msgpack.unpackb(frame, strict_map_key=False)
    except Exception as error:  # msgpack raises many types of exceptions
        raise WireError(f"not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise WireError("not a map")
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _READERS:
        raise WireError(f"unknown kind {kind!r}; this side speaks version {PROTOCOL_VERSION}")
    message: Message = _READERS[kind](fields)
    return message


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no place in a message")
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


FieldReader = Callable[[Any], Any]  # value -> checked value; a WireError names the field


def _reader(hint: Any, where: str) -> FieldReader:
    """Return a function that checks a value of type `hint` and builds dataclasses from maps."""
    if hint is Any:
        return lambda value: value
    if dataclasses.is_dataclass(hint):
        return _dataclass_reader(hint, where)
    if get_origin(hint) is UnionType:  # only `X | None` is declared above
        (inner,) = (_reader(arm, where) for arm in get_args(hint) if arm is not NoneType)
        return lambda value: None if value is None else inner(value)
    if get_origin(hint) is list:
        item = _reader(get_args(hint)[0], where)
        return lambda value: [item(x) for x in _typed(value, list, where)]
    if get_origin(hint) is dict:
        item = _reader(get_args(hint)[1], where)
        return lambda value: {
            _typed(k, str, where): item(x) for k, x in _typed(value, dict, where).items()
        }
    if hint is float:
        return lambda value: float(value) if type(value) is int else _typed(value, float, where)
    return lambda value: value if type(value) is hint else _typed(value, hint, where)


def _dataclass_reader(kind: Any, where: str) -> FieldReader:
    readers = {
        name: _reader(hint, f"{where}.{name}") for name, hint in get_type_hints(kind).items()
    }
    names, in_order = readers.keys(), tuple(readers.items())

    def read(value: Any) -> Any:
        fields = _typed(value, dict, where)
        if fields.keys() != names:
            odd = sorted(map(repr, fields.keys() ^ names))
            raise WireError(f"{where} lacks, or has beyond its fields: {', '.join(odd)}")
        return kind(*[reader(fields[name]) for name, reader in in_order])

    return read


def _typed(value: Any, kind: type[Any], where: str) -> Any:
    if type(value) is not kind:
        raise WireError(f"{where} is {type(value).__name__}, declared {kind.__name__}")
    return value


_READERS: Final[dict[str, FieldReader]] = {
    name: _dataclass_reader(kind, name) for name, kind in KINDS.items()
}
