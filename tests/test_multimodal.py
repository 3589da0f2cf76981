"""Multimodal parts as token runs."""

from __future__ import annotations

import pytest

import preble
from preble.errors import InvalidConfig
from preble.multimodal import FIRST_CONTENT_ID, content_token_ids


def test_equal_content_gives_equal_runs_and_different_content_differs_at_once() -> None:
    cat, dog = content_token_ids(b"a cat", 256), content_token_ids(b"a dog", 256)
    assert cat == content_token_ids(b"a cat", 256)
    assert cat[0] != dog[0]
    assert len(cat) == 256 and cat.itemsize == 4


def test_content_ids_lie_above_every_vocabulary_and_within_int32() -> None:
    run = content_token_ids(b"\x00" * 64, 10_000)
    assert min(run) >= FIRST_CONTENT_ID and max(run) < 2**31


def test_a_shorter_run_is_a_prefix_of_a_longer_one() -> None:
    assert content_token_ids(b"x", 300)[:100] == content_token_ids(b"x", 100)


def test_questions_about_one_image_go_to_the_worker_that_has_seen_it() -> None:
    scheduler = preble.GlobalScheduler(["a", "b"])
    image = content_token_ids(b"photo", 500).tolist()
    first = scheduler.schedule([1, 2, *image, 7])
    scheduler.first_token(first.request_id)
    again = scheduler.schedule([1, 2, *image, 8, 9])
    assert (again.worker, again.matched_tokens) == (first.worker, 502)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_bad_count_is_refused(count: object) -> None:
    with pytest.raises(InvalidConfig, match="count"):
        content_token_ids(b"x", count)  # type: ignore[arg-type]
