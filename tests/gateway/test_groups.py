"""Samples of one prompt at the gateway: which are a group, by their request or by a header."""

from __future__ import annotations

import numpy as np
import pytest

from preble import SamplingParams
from preble.gateway.core.http_errors import ApiError
from preble.gateway.core.request_headers import group_of
from preble.gateway.text.choices import ChoiceJob, jobs_for

PROMPTS = [np.arange(3, dtype=np.int32), np.arange(4, dtype=np.int32)]


def groups(choices: int, named: str | None = None) -> list[object]:
    template = ChoiceJob(0, "r#1", PROMPTS[0], SamplingParams(), group=named)
    return [job.group for job in jobs_for(PROMPTS, template, choices)]


def test_the_choices_of_a_prompt_are_a_group_of_their_own() -> None:
    first, second, third, fourth = groups(2)
    assert first == second != third == fourth and first is not None and third is not None


def test_a_request_for_one_choice_is_of_no_group() -> None:
    assert groups(1) == [None, None]


@pytest.mark.parametrize("choices", [1, 3])
def test_a_group_that_the_client_names_is_that_of_all_choices(choices: int) -> None:
    assert groups(choices, "step-7/prompt-3") == ["step-7/prompt-3"] * (2 * choices)


def test_the_header_names_a_group_and_what_is_no_name_is_refused() -> None:
    assert group_of({}) is None and group_of({"x-preble-group": ""}) is None
    assert group_of({"x-preble-group": "step-7/prompt-3"}) == "step-7/prompt-3"
    for wrong in ("two words", "x" * 129, "é"):
        with pytest.raises(ApiError, match="x-preble-group must be") as error:
            group_of({"x-preble-group": wrong})
        assert error.value.status == 400
