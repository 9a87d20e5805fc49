"""Prompts and answers that are kept in the metadata of a recording."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.record import texts
from perfmodel.routing.checks import MAX_METADATA, checked_metadata

TEXTS = st.lists(st.tuples(st.text(max_size=30), st.text(max_size=200)), min_size=1, max_size=8)


@given(TEXTS, st.integers(0, 1500))
def test_answers_fit_or_are_cut(pairs: list[tuple[str, str]], room: int) -> None:
    prompts, answers = [list(column) for column in zip(*pairs, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        needed = sum(len(json.dumps(text)) for text in prompts) + 150 * len(prompts)
        patch.setattr(texts, "MAX_METADATA", texts.REST + needed + room)
        texts.check_prompts(prompts)
        found = texts.kept_texts(prompts, answers)
        assert len(json.dumps(found["texts"])) <= needed + room
    assert [one["prompt"] for one in found["texts"]] == prompts
    kept = [one["answer"] for one in found["texts"]]
    assert all(whole.startswith(part) for whole, part in zip(answers, kept, strict=True))
    assert found.get("texts_cut", 0) == sum(part != whole for part, whole in zip(kept, answers, strict=True))


def test_a_long_recording_can_be_saved() -> None:
    prompts, answers = ["ask"] * 40, ["\N{SNOWMAN}" * 2**15] * 39 + ["short"]
    texts.check_prompts(prompts)
    found = texts.kept_texts(prompts, answers)
    assert found["texts_cut"] == 39
    assert found["texts"][-1] == {"prompt": "ask", "answer": "short"}
    assert all(len(one["answer"]) > 8000 for one in found["texts"][:-1])
    checked_metadata({"model": "m", "source": "recorded", "how": "x" * 20_000, **found})


def test_prompts_that_do_not_fit_are_refused_at_once() -> None:
    texts.check_prompts(["x" * (MAX_METADATA - texts.REST - 200)])
    with pytest.raises(PerfModelError, match=r"keep_text: the prompts need .* letters of metadata; allowed: "):
        texts.check_prompts(["x" * MAX_METADATA])
