"""Tiny checkpoints are made whole or not at all, by one maker or several."""

import multiprocessing
import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from scripts.fixtures.checkpoint_files import new_directory, randomise


def test_random_weights_do_not_seed_the_random_state() -> None:
    drawn = []
    for _ in range(2):
        randomise(nn.Linear(4, 4))
        drawn.append(mx.random.uniform(shape=(4,)).tolist())
    assert drawn[0] != drawn[1]


def make(target: Path) -> None:
    with new_directory(target) as directory:
        (directory / "file").write_text("whole")


def test_two_makers_at_once_end_with_one_good_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    makers = [context.Process(target=make, args=(tmp_path / "model",)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert [maker.exitcode for maker in makers] == [0, 0]
    assert os.listdir(tmp_path) == ["model"]
    assert (tmp_path / "model" / "file").read_text() == "whole"


def test_the_slower_of_two_makers_keeps_the_faster_ones_directory(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_directory(target) as mine:
        (mine / "file").write_text("mine")
        with new_directory(target) as theirs:
            (theirs / "file").write_text("theirs")
    assert (target / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["model"]


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "model") as directory:
        (directory / "file").write_text("half")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
