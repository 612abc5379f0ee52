"""Reads the sampling parameters that all dialects share, and the format of the answer."""

from typing import Any, Final

from hearth.proxy.api.body import field_readers as fields
from hearth.proxy.api.body.field_readers import Body
from hearth.shared.wire_messages import Sampling

TOKENS_MAX: Final = 2**31 - 1
INTEGER_MAX: Final = 2**63 - 1  # a limit above TOKENS_MAX is accepted, and means no limit
UNLIMITED: Final = (-2, -1)  # values for "no limit" in llama.cpp, Ollama and LM Studio
RANDOM_SEED: Final = -1  # value for "no seed" in the same servers
TOP_K_MAX: Final = 10_000_000
PENALTY_MIN: Final = 0.01  # a logit divided by a smaller number overflows
PENALTY_MAX: Final = 10.0
STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 256
BIASES_MAX: Final = 1_024
TOP_LOGPROBS_MAX: Final = 20


def read_sampling(
    body: Body, *, max_tokens: int | None, stop: str, top_logprobs: int | None = None
) -> Sampling:
    """Return the sampling parameters in `body`; `stop` names the field with stop strings."""
    top_p = fields.number(body, "top_p", 0, 1)
    raw_top_k = fields.integer(body, "top_k", -1, TOP_K_MAX)
    top_k = 0 if raw_top_k == -1 else raw_top_k  # other servers write -1 for "off"
    if top_p == 0:  # as with a tiny top_p, only the likeliest token is left
        top_p, top_k = 1.0, 1
    names = ("repetition_penalty", "repeat_penalty")  # of mlx-lm; of llama.cpp and Ollama
    penalties = [fields.number(body, name, PENALTY_MIN, PENALTY_MAX) for name in names]
    seed = fields.integer(body, "seed", -(2**63), 2**64 - 1)
    return Sampling(
        temperature=fields.number(body, "temperature", 0, 2),
        top_p=top_p,
        top_k=top_k,
        min_p=fields.number(body, "min_p", 0, 1),
        repetition_penalty=next((penalty for penalty in penalties if penalty is not None), None),
        presence_penalty=fields.number(body, "presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number(body, "frequency_penalty", -2, 2) or 0.0,
        # The random generator is seeded with 64 unsigned bits.
        seed=None if seed is None or seed == RANDOM_SEED else seed % 2**64,
        max_tokens=max_tokens,
        stop=_stops(body, stop),
        logit_bias=_logit_bias(body),
        top_logprobs=top_logprobs,
        speculate=fields.optional_boolean(body, "speculate"),
    )


def read_max_tokens(body: Body, *names: str, low: int = 1) -> int | None:
    """Return the first token limit among the fields `names` of `body`; all of them are checked."""
    wanted = [name for name in names if body.get(name) not in UNLIMITED]
    limits = [fields.integer(body, name, low, INTEGER_MAX) for name in wanted]
    return next((min(limit, TOKENS_MAX) for limit in limits if limit is not None), None)


def _stops(body: Body, name: str) -> list[str]:
    value = body.get(name)
    if value is None:
        return []
    stops = [value] if type(value) is str else value
    allowed = f"up to {STOPS_MAX} strings of up to {STOP_CHARS_MAX} characters"
    if type(stops) is not list or len(stops) > STOPS_MAX:
        fields.refuse(name, value, allowed)
    for stop in stops:
        if type(stop) is not str or len(stop) > STOP_CHARS_MAX:
            fields.refuse(name, stop, allowed)
    return [stop for stop in stops if stop]  # web forms send an empty string for no stop


def _logit_bias(body: Body) -> dict[str, float]:
    entries = fields.optional_object(body, "logit_bias")
    if len(entries) > BIASES_MAX:
        fields.refuse("logit_bias", f"{len(entries)} entries", f"up to {BIASES_MAX} entries")
    biases = {}
    for token_id in entries:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 9):
            fields.refuse("logit_bias", token_id, "a token id in decimal")
        param = f"logit_bias.{token_id}"
        bias = fields.number(entries, token_id, -100, 100, param)
        if bias is None:
            fields.refuse(param, None, "a number from -100 to 100")
        biases[str(int(token_id))] = bias
    return biases


def read_format(value: Any, param: str, inner: str = "") -> dict[str, Any]:
    """Return the fields of Constraints that `value` asks for; {} if any text is allowed.

    The schema is in the field `inner` of `value`, or directly in `value`. The second form is read
    in every dialect, also with a json_object, as in llama.cpp.

    Raises:
        RequestError: the format is not one of the API's, or its schema is not an object.
    """
    answer_format = {} if value is None else fields.json_object(value, param)
    kind = answer_format.get("type", "text")
    if kind == "text":
        return {}
    if kind == "json_object" and answer_format.get("schema") is None:
        return {"is_json": True}
    if kind not in ("json_object", "json_schema"):
        fields.refuse(f"{param}.type", kind, "text, json_object or json_schema")
    is_nested = bool(inner) and answer_format.get("schema") is None
    where = f"{param}.{inner}" if is_nested else param
    holder = fields.json_object(answer_format.get(inner), where) if is_nested else answer_format
    fields.text(holder, "name", f"{where}.name")
    if (strict := holder.get("strict")) is not None and type(strict) is not bool:
        fields.refuse(f"{where}.strict", strict, "true or false; it always holds here")
    return {"is_json": True, "schema": fields.json_object(holder.get("schema"), f"{where}.schema")}
