"""Reads images with a tiny checkpoint of each family, warm against cold and against mlx-vlm."""

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
import pytest

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.prompt.images.image_processor import unpadded
from hearth.worker.prompt.prompt_with_sampled_turns import BuiltPrompt, PromptContent
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.setup.load_setup import VisionParts, make_vision
from hearth.worker.stream.detokenise import Vocabulary
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.fixtures.vision_families import make_family
from scripts.fixtures.vision_family_configs import FAMILIES
from scripts.harness.image_files import painted, saved
from scripts.harness.socketless_worker import Answer, Machine
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.prompt_builders import builder_for

# Gemma 4's feature extractor and Kimi-VL's processor, upstream.
pytestmark = [
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values"),
    pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated"),
]

SETTINGS = {"DEFAULT_THINKING": "false"}
SIZE = (112, 112)
TOKENS_MAX = 6
REFUSED = {
    "llava_next": "rows of shapes",
    "paligemma": "writes two images otherwise than each by itself",
    "gemma4_both_ways": "in one forward alone",
    "mllama": "writes two images otherwise than each by itself",
    "idefics2": "writes two images otherwise than each by itself",
    "molmo": "the chat template does not say how it shows one",
    "minicpmv4_6": "writes two images otherwise than each by itself",
}
# One of each kind of processor, cache and marks around images by day; in docs/clients.md stand all.
BY_DAY = ("glm4v", "internvl", "gemma4", "lfm2_vl", "deepseek_vl_v2")
READ = [
    pytest.param(name, marks=() if name in BY_DAY else pytest.mark.night)
    for name in FAMILIES
    if name not in (*REFUSED, "florence2")  # which is refused as a whole
]


@dataclass
class Family:
    """A family's checkpoint, loaded as a worker loads it."""

    name: str
    directory: Path
    model: LoadedModel
    vision: VisionParts

    def built(self, *parts: str | int) -> BuiltPrompt:
        """Return the prompt of a question of words, and of images by their numbers."""
        builder = builder_for(self.model.tokenizer, form=self.vision.form, **SETTINGS)
        numbers = [part for part in parts if isinstance(part, int)]
        pictures = {str(n): self.vision.reader.read(str(n), file_of(n)) for n in numbers}
        return builder.build(PromptContent(asked(*parts), [], images=pictures))

    def machine(self, **how: Any) -> Machine:
        marks = turn_marks(self.model.tokenizer)
        return Machine(self.model, marks, Vocabulary(self.model.tokenizer), is_exact=True, **how)

    @cached_property
    def following(self) -> list[int]:
        """The tokens of a turn's end, a question of words and the next answer's header."""
        text = "<|im_end|>\n<|im_start|>user\nThanks. And now?<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self.model.tokenizer.encode(text, add_special_tokens=False)
        return ids


def file_of(number: int) -> bytes:
    return saved(painted(number, SIZE), "PNG")


def asked(*parts: str | int) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": str(part)}
        for part in parts
    ]
    return [{"role": "system", "content": "You look."}, {"role": "user", "content": content}]


def answered(machine: Machine, ids: list[int], images: Any) -> Answer:
    answer = machine.submit(ids, TOKENS_MAX, images)
    machine.run()
    return machine.settled(answer)


def made(name: str, tmp: Path) -> tuple[Path, LoadedModel]:
    make_family(name, tmp / name, fixture_dir("qwen3_vl") / "tokenizer.json")
    return tmp / name, load_model(load_settings({"MODEL_PATH": str(tmp / name)}, None))


@pytest.fixture(scope="module", params=READ)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    directory, model = made(request.param, tmp_path_factory.mktemp("families"))
    vision = make_vision(model, load_settings(SETTINGS, None))
    assert vision is not None
    yield Family(request.param, directory, model, vision)


def test_a_prompt_with_images_and_its_answer_are_mlx_vlms(family: Family, tmp_path: Path) -> None:
    parts = ("Look: ", 0, "\nand at this: ", 1, "\nCompare them.")
    built = family.built(*parts)
    paths = [tmp_path / f"{number}.png" for number in (0, 1)]
    for number, path in enumerate(paths):
        path.write_bytes(file_of(number))
    assert family.model.vision is not None
    model, processor = family.model.vision.model, family.model.vision.processor
    if family.name == "llava":
        processor.process = functools.partial(unpadded, processor)
    text = family.model.tokenizer.apply_chat_template(
        asked(*parts), add_generation_prompt=True, tokenize=False, enable_thinking=False
    ).removeprefix(FAMILIES[family.name].start)
    images = [str(path) for path in paths]
    theirs = dict(mlx_vlm.prepare_inputs(processor, images=images, prompts=text))
    assert built.ids == np.array(theirs["input_ids"]).flatten().tolist()
    if family.name == "deepseek_vl_v2":  # it asks for the row behind its last image
        theirs["images_spatial_crop"] = mx.pad(
            theirs["images_spatial_crop"], [(0, 0), (0, 2), (0, 0)]
        )
    theirs["mask"] = theirs.pop("attention_mask")
    said = mlx_vlm.stream_generate(
        model, processor, text, max_tokens=TOKENS_MAX, temperature=0.0, **theirs
    )
    expected = [response.token for response in said][:TOKENS_MAX]
    answer = answered(family.machine(), built.ids, built.images)
    assert answer.tokens == expected
    other = family.built("Look: ", 2, "\nand at this: ", 1, "\nCompare them.")
    differs = answered(family.machine(keeps=False), other.ids, other.images).logits[0]
    assert np.abs(answer.logits[0] - differs).max() > 1e-3, "the image is seen"


def test_turns_with_an_image_read_and_encode_only_what_is_new(family: Family) -> None:
    warm, cold = family.machine(), family.machine(keeps=False)

    def asked_of_both(ids: list[int], images: Any) -> Answer:
        answer, expected = (answered(each, ids, images) for each in (warm, cold))
        same_tokens(answer, expected)
        assert all(map(np.array_equal, answer.logits, expected.logits)), "to the bit"
        return answer

    encoder = warm.engine.vision
    assert encoder is not None
    first = family.built("Look at this picture, please: ", 0, "\nWhat does it show?")
    (run,) = first.images
    answer = asked_of_both(first.ids, first.images)
    assert (answer.cached, encoder.encoder_calls) == (0, 1)
    again = asked_of_both(first.ids, first.images)
    assert again.cached >= run.end and encoder.encoder_calls == 1, "nothing of it is read twice"
    following = [*first.ids, *answer.tokens, *family.following]
    turn = asked_of_both(following, first.images)
    assert turn.cached >= run.end and encoder.encoder_calls == 1
    swapped = family.built("Look at this picture, please: ", 1, "\nWhat does it show?")
    other = asked_of_both(swapped.ids, swapped.images)
    assert 0 < other.cached <= run.start and encoder.encoder_calls == 2
    assert not warm.keeper.counts["vlm_retreat"]


def test_what_a_user_writes_is_no_image(family: Family) -> None:
    marker = FAMILIES[family.name].marker
    shown = family.vision.reader.read("0", file_of(0))
    kinds = {token for token in shown.ids if token in family.model.tokenizer.added_tokens_decoder}
    written = "".join(family.model.tokenizer.decode([token]) for token in kinds)
    built = family.built(f"This is text: {marker} {written} and this is an image: ", 0)
    (run,) = built.images
    assert tuple(built.ids[run.start : run.end]) == shown.ids
    assert not kinds & {*built.ids[: run.start], *built.ids[run.end :]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("llava_next", "molmo") else pytest.mark.night)
        for name in REFUSED
    ],
)
def test_a_family_whose_images_are_refused_says_why_and_is_served_for_text(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, model = made(name, tmp_path)
    with caplog.at_level(logging.WARNING, "hearth.worker"):
        assert make_vision(model, load_settings(SETTINGS, None)) is None
    (told,) = [text for text in caplog.messages if text.startswith("images are refused: ")]
    assert REFUSED[name] in told
