"""Defines every message that crosses the socket between proxy and worker, and nothing else.

A frame is one msgpack map: {"kind": class name, field: value, ...}. Any change to a message bumps
PROTOCOL_VERSION; both sides compare it once, in Hello and Welcome.
Every Submit ends in exactly one Finished or Failed, every Count in one Counted or Failed, every
Status in one Told or Failed, every Embed in one Embedded or Failed, every Rerank in one Reranked or
Failed. A worker that embeds and ranks is sent the last two, and no other is.
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
# (variable, on, off) of chat templates; enable_thinking and thinking come first.
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
    """How much the model may think, as the client said it; the worker knows its template's words.

    A level with no `on` says how hard to work, not whether to think.
    """

    on: bool | None = None
    level: str | None = None  # of THINKING_LEVELS
    budget: int | None = None  # tokens, >= 0

    @property
    def options(self) -> dict[str, Any]:
        """The fields in which a client says the same."""
        level = {"effort": self.level} if self.on is None else self.level
        name = "output_config" if self.on is None else "reasoning_effort"
        rows = (
            ("enable_thinking", self.on),
            (name, self.level and level),
            ("thinking_budget", self.budget),
        )
        return {key: value for key, value in rows if value is not None}


@dataclass(frozen=True, slots=True)
class ThinkingFacts:
    """What a model's template can be told about thinking, and what it does where nobody says."""

    # "on" | "off" | "adaptive" (the model decides); without a switch also "always" | "never"
    default: str = "never"
    has_switch: bool = False  # between on and off
    levels: list[str] = field(default_factory=list)  # of THINKING_LEVELS, least first


PROTOCOL_VERSION: Final = 19
FRAME_BYTES_MAX: Final = 80 * 1024 * 1024  # a 64 MB request body, and room for its envelope


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rules by which tokens are chosen and an answer ends. None = the worker's settings."""

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
    """The form that the answer must have, beyond what the model would say by itself."""

    tool_choice: str = "auto"  # "auto" | "none" | "required": one call at least
    tool_names: list[str] = field(default_factory=list)  # that may be called; empty = all
    parallel_calls: bool = True  # False = one call at most
    is_json: bool = False  # the answer is one JSON value, an object where `schema` is None
    schema: dict[str, Any] | None = None  # JSON schema of the answer
    thinking_budget: int | None = None  # tokens after which the think block is closed


@dataclass(frozen=True, slots=True)
class Speaker:
    """The caller, as far as the client tells. A field is empty where it does not."""

    key: str = ""  # digest of the API key
    session: str = ""
    agent: str = ""  # of a sub-agent inside the session
    parent: str = ""  # the session that this one works for
    client: str = field(default="", compare=False)  # the program: "claude-code", "opencode"
    client_name: str = field(default="", compare=False)  # the same for people: "Claude Code 2.1"
    conversation: str = field(default="", compare=False)  # what stands for `session` where none is
    title: str = field(default="", compare=False, repr=False)  # first words; in memory only

    @property
    def label(self) -> str:
        """The name of the session in reports: the client's own, or else what it is told by."""
        return self.session or self.conversation or self.client or "anonymous"


@dataclass(frozen=True, slots=True)
class MessageName:
    """One message in the canonical pipeline: what it is known by, never what the model is fed."""

    canonical: bytes  # digest of its canonical form; b"" where that is nothing at all
    exact: bytes  # digest of what the model is shown
    rules: list[str] = field(default_factory=list)  # that made the first of the second
    link: bytes = b""  # of all canonical messages up to and with it (shared/wire_messages.py)


START: Final = b""  # the link before the first message


def linked(names: Iterable[MessageName], link: bytes = START) -> list[MessageName]:
    """Return `names` with their links, behind messages that end in `link`.

    The proxy makes them once, where a request is parsed; whoever asks which conversation it is
    compares links. A message whose canonical form is nothing leaves the link as it is.
    """
    found = []
    for name in names:
        if name.canonical:
            link = hashlib.blake2b(link + name.canonical, digest_size=16).digest()
        found.append(MessageName(name.canonical, name.exact, name.rules, link))
    return found


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before rendering: all three API dialects become this.

    A message is {role, content, reasoning_content, tool_calls, tool_call_id, name}. Its content is
    a string; where it shows images, or has several texts, a list of {"type": "text", "text"} and
    {"type": "image", "image": a key of `images`}, in their order.
    Not for templates are an assistant's `signatures` (of thinking that we may have issued) and a
    tool result's `tool_references` (names of deferred tools that it loads).
    Where it `continues`, the last message is an assistant's text, and the answer is its rest.
    A raw prompt has no messages: it is `text`, or the tokens `ids`, as they are.
    """

    messages: list[Any]
    tools: list[Any] = field(default_factory=list)  # {"type": "function", "function": {...}}
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # the template's own, as sent
    deferred: list[Any] = field(default_factory=list)  # tools shown only where they are loaded
    speaker: Speaker = field(default_factory=Speaker)
    names: list[MessageName] = field(default_factory=list)  # one a message, or none at all
    delta_chars: int = 0  # characters that the canonical form has fewer
    text: str | None = None
    ids: list[int] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)  # by digest: files as they came
    places: dict[str, str] = field(default_factory=dict)  # by digest: where the client has it first
    continues: bool = False
    thinking: ThinkingWish = field(default_factory=ThinkingWish)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that a worker found out about its model when it loaded it."""

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
    model_tokens: int = 0  # the context that the model was made for
    context_by: str = "model"  # the smallest of "model" | "setting" | "memory"
    thinking: ThinkingFacts = field(default_factory=ThinkingFacts)
    ranks: int = 1  # processes that compute it together
    computed_in: str = ""  # in a few words: "dense float32, made from 4 bits: 0.5 GB"


@dataclass(frozen=True, slots=True)
class EncoderFacts:
    """The facts that a worker found out about a model that embeds or ranks."""

    architecture: str  # model_type of config.json
    tokens_max: int  # of a text, or of a query and a document together
    weight_bytes: int
    dimensions: int = 0  # of a vector; 0 = it ranks
    pooling: str = ""  # "mean", "cls", "lasttoken" or "max"; "" = it ranks


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a request, in tokens and milliseconds."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens served from kept KV, <= prompt_tokens
    prefilled_tokens: int  # forwarded for this request before its first token
    completion_tokens: int  # sampled, the end-of-turn token included
    reasoning_tokens: int = 0
    source: str = "none"  # where cached_tokens came from: slot | ram | ssd | none
    ttft_ms: int = 0  # from Submit's receipt to the first token
    finish_ms: int = 0  # from Submit's receipt to the last token
    divergence: dict[str, Any] | None = None  # what it lost against its own line, and why
    image_tokens: int = 0  # of prompt_tokens, those that stand for images
    queue_ms: int = 0  # of ttft_ms, until it had a slot; all of it where it never had one
    match: str = "none"  # how the prompt relates to what is kept: exact | prefix | lcp ...
    session_kind: str = "none"  # main | agent | side; none = it is in no session
    image_ms: int = 0  # of the time since its receipt, in the image encoder for it
    matched_tokens: int = 0  # that the prompt shared with anything kept, >= cached_tokens
    canonical_tokens: int = 0  # of cached_tokens, those before anything fast
    idle_tokens: int = 0  # that were read in idle time for its session until it began
    accepted_prediction_tokens: int = 0  # drafted, and the model said the same
    rejected_prediction_tokens: int = 0  # drafted, and it did not
    decode_forwards: int = 0  # in which its tokens were computed, <= completion_tokens
    warnings: list[str] = field(default_factory=list)  # sentences: what was not done as asked


# ---------------------------------------------------------------- proxy to worker


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame on a connection. Answered by Welcome."""

    protocol_version: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate. Answered by Admitted, Progress*, Delta*, then one Finished; or by one Failed.

    The lease runs from its receipt; Renew extends it, and a request whose lease ran out is
    cancelled: its proxy or its client is gone.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling
    constraints: Constraints = field(default_factory=Constraints)
    use_kv_cache: bool = True  # read and write the cache and the turns
    prefill_only: bool = False  # end, with `reason` "prefilled", where the first token would come
    pin: bool = False  # what is kept of the prompt stays, whatever else would need its room
    prediction: str = ""  # the client's guess of the answer's text
    adapter: str = ""  # of ADAPTERS, that the model is to have; "" = none


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client left. Unknown ids are ignored: the answer may have crossed it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Renew:
    """These requests' clients are still there."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class TokenQuery:
    """What is asked about the tokens of a prompt, and how one that is raw is read."""

    tells: str = "count"  # and besides the count: "ids" | "pieces" | "text"
    adds_header: bool = True  # messages: the generation prompt is part of the prompt
    adds_beginning: bool = True  # raw text: so is what the tokenizer has any text begin with
    reads_controls: bool = True  # raw text: control tokens that it spells out are control tokens


@dataclass(frozen=True, slots=True)
class Count:
    """Asks how many tokens a prompt is, and which. Answered by Counted or Failed.

    It may be longer than the context, and a raw prompt empty: nothing computes it.
    """

    request_id: str
    prompt: Prompt
    query: TokenQuery = field(default_factory=TokenQuery)


@dataclass(frozen=True, slots=True)
class Status:
    """Tell about the cache, empty it, or give up a pin. Answered by Told or Failed."""

    request_id: str
    # "cache" | "clear_cache" | "unpin" | "prompt" | "sessions" | "session" | "tree", in brief;
    # "doctor" | "check_again": what the checks of this model found; the latter has them run again
    what: str
    about: str = ""  # the request id whose prompt or pin, or the session that is asked for
    key: str = ""  # digest of the API key whose sessions, prompts, pins it is; "" = everyone's


@dataclass(frozen=True, slots=True)
class Embed:
    """Give a vector for each text. Answered by Embedded or Failed. Its lease is as Submit's."""

    request_id: str
    texts: list[Any]  # each a text, or the list of token ids of one
    dimensions: int | None  # of a vector; None = all that the model has
    truncate: bool  # a text that is too long is cut instead of refused


@dataclass(frozen=True, slots=True)
class Rerank:
    """Tell of each document how much it answers the query. Answered by Reranked or Failed.

    A document that is too long is cut.
    """

    request_id: str
    query: str
    documents: list[str]


@dataclass(frozen=True, slots=True)
class ShortTurns:
    """Whether answers stream, beside which a worker that embeds takes short turns."""

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
    """Sent each second to everyone who said Hello, from a thread that never waits for the GPU."""

    state: str  # "loading" | "ready"
    running: int  # requests that hold a cache
    waiting: int  # requests that do not yet
    steps: int  # scheduler steps since start: stands still while running > 0 = stuck
    active_bytes: int  # memory in use: MLX's arrays, and what the process takes beside them
    model: ModelFacts | None
    wait_s: float = 0.0  # estimated, until a request that came now would hold one
    queue: list[str] = field(default_factory=list)  # ids of the first that wait, the next one first
    step: str = ""  # of a start: "weights", "cache"; "" once it is ready
    step_s: float = 0.0  # that it has taken by now
    step_bytes: int = 0  # that the step brings into memory, where that is known
    held_bytes: int = 0  # of them, those that are there
    requests_max: int = 0  # that may be in the worker; one more is refused
    cpu_s: float = 0.0  # that the process has computed on a CPU alone; 0 = a GPU computes
    prefill_tokens_per_s: float = 0.0  # as measured; 0 = nothing was read yet
    reading_tokens: int = 0  # in the forward of a prompt that runs
    encoders: dict[str, EncoderFacts] = field(default_factory=dict)  # by "embeddings" | "rerank"


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is accepted and will end in a Finished (or Failed, if the worker breaks).

    Sent once it is rendered, also while the model is busy with others.
    """

    request_id: str
    prompt_tokens: int
    signature: str = ""  # of the thinking to come: the client sends it back with its echo


@dataclass(frozen=True, slots=True)
class Progress:
    """`done_tokens` of the prompt are in the KV cache.

    The first one says how many were kept of earlier requests; then one comes for each chunk. One
    that says less comes where that was lost before the model took the request.
    """

    request_id: str
    done_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token's log probability, with the likeliest alternatives."""

    token_id: int
    token: str  # its text alone; a partial character shows as U+FFFD here, never in Delta.text
    token_bytes: bytes
    logprob: float
    top: list[list[Any]]  # [token_id, text, bytes, logprob], most likely first


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins."""

    id: str  # the model's own, where that has letters, digits, - and _ only; else made here
    name: str


@dataclass(frozen=True, slots=True)
class Delta:
    """Text to append. `seq` counts 0, 1, 2... within a request so that a lost frame is seen.

    On the channel "tool_call" the text is the next piece of the arguments' JSON, of the call that
    `call` began last. All pieces of one call together are one JSON object, unless the answer was
    cut off in it.
    """

    request_id: str
    seq: int
    channel: str  # "content" | "reasoning" | "tool_call"
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    call: CallStart | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last frame of a request that ran."""

    request_id: str
    reason: str  # "stop" | "length" | "tool_calls" | "cancelled" | "prefilled"
    stop_sequence: str | None  # the client's stop string that ended it
    usage: Usage

    @property
    def is_cut(self) -> bool:
        """Whether the model would have gone on, maybe amid a call."""
        return self.reason == "length" or self.stop_sequence is not None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last frame of a request that did not run to its end."""

    request_id: str
    status: int
    code: str
    text: str
    retry_after_s: int | None = None  # when the same request may succeed; None = not known
    param: str | None = None  # the field of the client's request that is wrong


@dataclass(frozen=True, slots=True)
class Counted:
    """Answers Count; of a large prompt no field is a list, which the event loop would build."""

    request_id: str
    tokens: int
    ids: bytes = b""  # of "ids" and "pieces": uint32, little-endian
    pieces: bytes = b""  # of "pieces": the bytes of each token, one behind the other
    piece_ends: bytes = b""  # where each of them ends: uint32, little-endian
    text: str = ""  # of "text": that of all tokens; an image is "[image]"


@dataclass(frozen=True, slots=True)
class Told:
    """Answers Status."""

    request_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Answers Embed: the vectors, and how many tokens each text is."""

    request_id: str
    vectors: bytes  # float32, little-endian, one text after the other, each of length 1
    dimensions: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Reranked:
    """Answers Rerank: a score from 0 to 1 for each document."""

    request_id: str
    scores: list[float]
    tokens: int  # of all documents, each with its query


Down = Hello | Submit | Cancel | Renew | Count | Status | Embed | Rerank | ShortTurns
Answer = Finished | Failed | Counted | Told | Embedded | Reranked  # each ends its request
Up = Welcome | Heartbeat | Admitted | Progress | Delta | Answer
Message = Down | Up

KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return the frame for `message`.

    Raises:
        WireError: a client's value cannot be carried: an integer beyond 64 bits, a lone
            surrogate, nesting past msgpack's limit, or a frame over FRAME_BYTES_MAX.
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
        WireError: the bytes are not exactly one known message with fields of the declared types.
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise WireError(f"frame is {len(frame):,} bytes; the limit is {FRAME_BYTES_MAX:,}")
    try:
        row = msgpack.unpackb(frame, strict_map_key=False)
    except Exception as error:  # msgpack raises ValueError and its kin by many names
        raise WireError(f"not msgpack: {error}") from error
    if not isinstance(row, dict):
        raise WireError("not a map")
    kind = row.pop("kind", None)
    if not isinstance(kind, str) or kind not in _READERS:
        raise WireError(f"unknown kind {kind!r}; this side speaks version {PROTOCOL_VERSION}")
    message: Message = _READERS[kind](row)
    return message


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} has no place in a message")
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


FieldReader = Callable[[Any], Any]  # value -> checked value; raises WireError, which says where


def _reader(hint: Any, where: str) -> FieldReader:
    """Return the function that checks, and where needed rebuilds, a value declared as `hint`."""
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
        row = _typed(value, dict, where)
        if row.keys() != names:
            odd = sorted(map(repr, row.keys() ^ names))
            raise WireError(f"{where} lacks, or has beyond its fields: {', '.join(odd)}")
        return kind(*[reader(row[name]) for name, reader in in_order])

    return read


def _typed(value: Any, kind: type[Any], where: str) -> Any:
    if type(value) is not kind:
        raise WireError(f"{where} is {type(value).__name__}, declared {kind.__name__}")
    return value


_READERS: Final[dict[str, FieldReader]] = {
    name: _dataclass_reader(kind, name) for name, kind in KINDS.items()
}
