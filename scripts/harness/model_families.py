"""Holds the large model families as test data: chat templates, special tokens, output formats.

The templates in scripts/harness/templates render what the public ones render for text, in words of
our own. The tokenizers are the fixtures' byte-level BPE with each family's marks as added tokens;
their ids fit the fixture models' embeddings, and mlx-lm itself finds out what their marks mean.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from mlx_lm.tokenizer_utils import load as load_from_disk
from tokenizers import AddedToken, Tokenizer

from hearth.worker.formats.shared.output_format import OutputFormat
from hearth.worker.prompt.chat_template import Template
from hearth.worker.prompt.render_messages import adapt_messages, call_text
from hearth.worker.prompt.template_capabilities import (
    TemplateCapabilities,
    ToolForm,
    template_capabilities,
)
from hearth.worker.stream.answer_parts import AnswerParts, ToolCall
from scripts.fixtures import checkpoint_files
from scripts.fixtures.fixture_cache import cache_dir

TEMPLATES = Path(__file__).parent / "templates"
ADDED_TOKENS_MAX = 24  # of one family; the trained tokens come first and are the same in all

QWEN_MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
DEEPSEEK_END = "<｜end▁of▁sentence｜>"


@dataclass(frozen=True)
class Family:
    """One family's tokenizer, template and manner of writing."""

    name: str
    write: Callable[[AnswerParts], str]
    controls: tuple[str, ...]  # special: decoding may leave them out
    marks: tuple[str, ...]  # added tokens that are ordinary text, as <think> is
    ends: tuple[str, ...]  # all that end a turn, as the model's generation config has them
    eos: str  # the tokenizer's own
    answer_end: str  # what the model ends an answer with
    call_end: str  # and a turn whose last word is a call
    bos: str | None = None
    calls_max: int | None = None  # in one turn; None = any number
    thinks: bool = True
    reasoning_field: str = "reasoning_content"

    @cached_property
    def directory(self) -> Path:
        """Return the directory of the tokenizer's files, made on first use on this machine."""
        return _made_once(self.name, self.write_tokenizer)

    def write_tokenizer(self, directory: Path, **config: Any) -> None:
        """Write the tokenizer's files, the template among them; `config` is added to its own."""
        tokenizer = Tokenizer.from_file(str(trained_tokenizer()))
        tokenizer.add_tokens(
            [AddedToken(text, special=True, normalized=False) for text in self.controls]
            + [AddedToken(text, special=False, normalized=False) for text in self.marks]
        )
        assert tokenizer.get_vocab_size() <= checkpoint_files.VOCAB_SIZE, self.name
        tokenizer.save(str(directory / "tokenizer.json"))
        names = {"eos_token": self.eos, "pad_token": self.controls[0], "bos_token": self.bos}
        checkpoint_files.write_tokenizer_config(directory, self.template, names | config)

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text()

    @cached_property
    def tokenizer(self) -> Any:
        """Return mlx-lm's TokenizerWrapper, with what mlx-lm inferred from the files."""
        return self.load(self.directory)

    def load(self, directory: Path) -> Any:
        ids = checkpoint_files.added_token_ids(directory / "tokenizer.json")
        return load_from_disk(directory, eos_token_ids=[ids[end] for end in self.ends])

    @cached_property
    def reader(self) -> OutputFormat:
        return OutputFormat(self.tokenizer, self.tool_form)

    @cached_property
    def capabilities(self) -> TemplateCapabilities:
        """Return what the template takes and shows."""
        return template_capabilities(Template(self.tokenizer))

    @property
    def tool_form(self) -> ToolForm:
        return self.capabilities.tool_form

    def render(self, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> str:
        """Return the prompt's text, with the tools in it as such a model is told of them.

        Raises what the template raises.
        """
        options = {"add_generation_prompt": True, "thinking": True, **options}
        if self.tool_form != "native":
            capabilities = replace(self.capabilities, refused=frozenset(), places_system=True)
            messages, tools, _ = adapt_messages(
                messages, tools or [], capabilities, adds_header=False
            )
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, **options
            )
        )

    def is_thinking(self, **options: Any) -> bool:
        """Tell whether the generation prompt opens a think block."""
        prompt = self.render([{"role": "user", "content": "omega"}], **options)
        return self.reader.is_thinking_open(prompt.rpartition("omega")[2])

    def written(self, parts: AnswerParts) -> str:
        """Return how the model writes `parts` behind its generation prompt, thinking allowed.

        Without the token that ends the turn. Inverts PartsReader.read for well-formed parts:
        texts without blanks at their ends and without the family's marks.
        """
        assert self.thinks or not parts.reasoning, self.name
        assert self.calls_max is None or len(parts.calls) <= self.calls_max, self.name
        return self.write(parts)

    def end_of(self, parts: AnswerParts) -> str:
        """Return the token that the model ends such a turn with."""
        return self.call_end if parts.calls else self.answer_end

    def message(self, parts: AnswerParts, call_ids: Iterable[str] = ()) -> dict[str, Any]:
        """Return the assistant message that this family's template takes such a turn as."""
        ids = list(call_ids) or map(call_id, range(len(parts.calls)))
        calls = [
            {
                "id": id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for id, call in zip(ids, parts.calls, strict=True)
        ]
        return {
            "role": "assistant",
            "content": parts.content,
            **({self.reasoning_field: parts.reasoning} if parts.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }


def call_id(number: int) -> str:
    """Return an id of nine letters and digits: the only ones that Mistral's template takes."""
    return f"call{number:05d}"


# ---------------------------------------------------------------- how each family writes


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _qwen3(parts: AnswerParts) -> str:
    thinking = f"<think>\n{parts.reasoning}\n</think>\n\n" if parts.reasoning else ""
    calls = (f"<tool_call>\n{_json(asdict(call))}\n</tool_call>" for call in parts.calls)
    return thinking + "\n".join(filter(None, (parts.content, *calls)))


def _qwen3_5(parts: AnswerParts) -> str:
    """Behind a prompt that has opened the think block."""
    calls = "\n".join(map(_xml_call, parts.calls))
    return f"{parts.reasoning}\n</think>\n\n" + "\n\n".join(filter(None, (parts.content, calls)))


def _xml_call(call: ToolCall) -> str:
    assert isinstance(call.arguments, dict)
    lines = (
        f"<parameter={name}>\n"
        f"{_json(value) if isinstance(value, dict | list) else value}\n</parameter>"
        for name, value in call.arguments.items()
    )
    return "\n".join([f"<tool_call>\n<function={call.name}>", *lines, "</function>\n</tool_call>"])


def _glm4(parts: AnswerParts) -> str:
    content = f"\n{parts.content}" if parts.content else ""
    calls = "".join(f"\n{_glm_call(call)}" for call in parts.calls)
    return f"\n<think>{parts.reasoning}</think>{content}{calls}"


def _glm_call(call: ToolCall) -> str:
    assert isinstance(call.arguments, dict)
    pairs = "".join(
        f"<arg_key>{name}</arg_key>\n"
        f"<arg_value>{value if isinstance(value, str) else _json(value)}</arg_value>\n"
        for name, value in call.arguments.items()
    )
    return f"<tool_call>{call.name}\n{pairs}</tool_call>"


def _harmony(parts: AnswerParts) -> str:
    messages = [f"analysis<|message|>{parts.reasoning}"] if parts.reasoning else []
    if parts.content or not parts.calls:
        messages.append(f"{'commentary' if parts.calls else 'final'}<|message|>{parts.content}")
    messages += [
        f"commentary to=functions.{call.name} <|constrain|>json<|message|>{_json(call.arguments)}"
        for call in parts.calls
    ]
    return "<|end|><|start|>assistant".join(f"<|channel|>{message}" for message in messages)


def _llama3(parts: AnswerParts) -> str:
    """A call is the whole turn: content beside it has no place in this format."""
    if not parts.calls:
        return parts.content
    (call,) = parts.calls
    assert not parts.content, parts.content
    return _json({"name": call.name, "parameters": call.arguments})


def _mistral(parts: AnswerParts) -> str:
    return parts.content + (
        f"[TOOL_CALLS]{_json([*map(asdict, parts.calls)])}" if parts.calls else ""
    )


def _with_calls(parts: AnswerParts, form: ToolForm = "manual") -> str:
    """As the prompts for models without tools of their own ask for calls."""
    return "\n".join(
        filter(None, (parts.content, *(call_text(asdict(call), form) for call in parts.calls)))
    )


def _deepseek(parts: AnswerParts) -> str:
    """Behind a prompt that has opened the think block."""
    return f"{parts.reasoning}</think>{_with_calls(parts)}"


_QWEN_TOKENS: dict[str, Any] = dict(
    controls=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    marks=QWEN_MARKS,
    ends=("<|im_end|>", "<|endoftext|>"),
    eos="<|im_end|>",
    answer_end="<|im_end|>",
    call_end="<|im_end|>",
)
FAMILIES = {
    each.name: each
    for each in (
        Family("qwen3", _qwen3, **_QWEN_TOKENS),
        Family("qwen3_5", _qwen3_5, **_QWEN_TOKENS),
        Family(
            "glm4",
            _glm4,
            controls=(
                *("<|endoftext|>", "[gMASK]", "<sop>"),
                *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            ),
            marks=(*QWEN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
            eos="<|endoftext|>",
            answer_end="<|user|>",
            call_end="<|observation|>",
        ),
        Family(
            "harmony",
            _harmony,
            controls=(
                *("<|endoftext|>", "<|startoftext|>", "<|return|>", "<|call|>"),
                *("<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|constrain|>"),
            ),
            marks=(),
            ends=("<|return|>", "<|endoftext|>", "<|call|>"),
            eos="<|return|>",
            answer_end="<|return|>",
            call_end="<|call|>",
            bos="<|startoftext|>",
            calls_max=1,
            reasoning_field="thinking",
        ),
        Family(
            "llama3",
            _llama3,
            controls=(
                *("<|begin_of_text|>", "<|end_of_text|>"),
                *("<|start_header_id|>", "<|end_header_id|>"),
                *("<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),
            ),
            marks=(),
            ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
            eos="<|eot_id|>",
            answer_end="<|eot_id|>",
            call_end="<|eot_id|>",
            bos="<|begin_of_text|>",
            calls_max=1,
            thinks=False,
        ),
        Family(
            "gemma3",
            partial(_with_calls, form="tool_code"),  # as Gemma's documentation has calls: Python
            controls=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
            marks=(),
            ends=("<eos>", "<end_of_turn>"),
            eos="<eos>",
            answer_end="<end_of_turn>",
            call_end="<end_of_turn>",
            bos="<bos>",
            thinks=False,
        ),
        Family("chatml", _with_calls, thinks=False, **_QWEN_TOKENS | {"marks": ()}),
        Family(
            "deepseek",
            _deepseek,
            controls=(
                *("<pad>", DEEPSEEK_END, "<｜begin▁of▁sentence｜>"),
                *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
                *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
                *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
            ),
            marks=("<think>", "</think>"),
            ends=(DEEPSEEK_END,),
            eos=DEEPSEEK_END,
            answer_end=DEEPSEEK_END,
            call_end=DEEPSEEK_END,
            bos="<｜begin▁of▁sentence｜>",
        ),
        Family(
            "mistral",
            _mistral,
            controls=(
                *("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
                *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
                *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            ),
            marks=(),
            ends=("</s>",),
            eos="</s>",
            answer_end="</s>",
            call_end="</s>",
            bos="<s>",
            thinks=False,
        ),
    )
}


family: Final = FAMILIES.__getitem__  # by its name; its tokenizer is made on first use


# ---------------------------------------------------------------- tools and files


def bare_tokenizer(wrapper: Any) -> Any:
    """Return transformers' tokenizer in mlx-lm's TokenizerWrapper."""
    return wrapper._tokenizer


def tools_for(calls: Iterable[ToolCall]) -> list[Any]:
    """Return the tools, in OpenAI's shape, whose schemas have the types of these arguments.

    Of two calls of one tool, both schemas count; types of one argument must agree.
    """
    properties: dict[str, dict[str, Any]] = {}
    for call in calls:
        assert isinstance(call.arguments, dict)
        known = properties.setdefault(call.name, {})
        known |= {
            name: {"type": JSON_TYPES.get(type(value), "object")}
            for name, value in call.arguments.items()
        }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Does {name}.",
                "parameters": {"type": "object", "properties": types, "required": list(types)},
            },
        }
        for name, types in properties.items()
    ]


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory in that which is named after all that these tokenizers are made from."""
    return checkpoint_files.made_once(
        cache_dir(Path(__file__), *sorted(TEMPLATES.glob("*.jinja"))) / name, make
    )


def trained_tokenizer() -> Path:
    """Return the tokenizer without added tokens that all families begin from."""
    train = partial(
        checkpoint_files.train_tokenizer,
        added_tokens=(),
        vocab_size=checkpoint_files.VOCAB_SIZE - ADDED_TOKENS_MAX,
    )
    return _made_once("trained", train) / "tokenizer.json"
