"""Recipes: settings that may all be given by themselves, and that the user's own replace."""

import argparse
from typing import Any

import pytest

from jobkit.spec.options import add_recipe_argument, add_spec_arguments, given_settings
from jobkit.spec.recipes import RECIPES
from jobkit.spec.runspec import RunSpec


def given(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_recipe_argument(parser)
    add_spec_arguments(parser)
    return given_settings(parser.parse_args(words))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_nothing_but_settings(name: str) -> None:
    spec = RunSpec(**given("--recipe", name))
    assert spec.differences().keys() <= RECIPES[name].keys()
    again = given(*spec.arguments())
    assert RunSpec(**again) == spec
    assert RunSpec(**again).run_id == spec.run_id


def test_what_the_user_gives_replaces_the_recipes_settings() -> None:
    assert given("--recipe", "fast", "--epochs", "3")["epochs"] == 3
    weak = given("--recipe", "fast", "--batch-size-per-rank", "64")
    assert (weak["batch_size_per_rank"], "global_batch_size" in weak) == (64, False)
    assert given("--epochs", "3") == {"epochs": 3}


def test_the_published_rate_is_that_of_a_sum_over_samples() -> None:
    """11.5 per 1024 x (1 + 1 / (1 - momentum)) samples, times the samples of a step."""
    fast = RECIPES["fast"]
    published = 11.5 / (1024 * (1 + 1 / (1 - fast["momentum"]))) * fast["global_batch_size"]
    assert fast["lr"] == pytest.approx(published, rel=0.01)
    assert fast["weight_decay"] == pytest.approx(0.0153 / 11.5, rel=0.01)
