"""Defects of recordings: each is found where it is, nowhere else, and mended as it says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.defects import DEFECTS, Finding, check, mend


def made(
    lengths: tuple[int, ...] = (60, 80),
    *,
    layers: int = 6,
    experts: int = 16,
    top_k: int = 2,
    sticky: float = 0.6,
    seed: int = 1,
    **changes: Any,
) -> RoutingTrace:
    """A clean trace: each sequence has experts of its own, and tokens keep some picks of the token before."""
    random = np.random.default_rng(seed)
    parts = []
    for length in lengths:
        taste = random.gumbel(size=(layers, experts))
        ids = np.empty((length, layers, top_k), np.uint8)
        bonus = np.zeros((layers, experts))
        for t in range(length):
            scores = taste + bonus + random.gumbel(size=(layers, experts))
            ids[t] = np.argsort(-scores, axis=-1)[:, :top_k]
            bonus = np.zeros((layers, experts))
            np.put_along_axis(bonus, ids[t].astype(int), 3 * sticky, axis=-1)
        parts.append(ids)
    weights = -np.sort(-random.random((sum(lengths), layers, top_k)), axis=-1)
    fields: dict[str, Any] = {
        "topk_ids": np.concatenate(parts),
        "topk_weights": (weights / weights.sum(-1, keepdims=True)).astype(np.float32),
        "sequence_offsets": np.cumsum([0, *lengths]),
        "prompt_len": np.array([length // 2 for length in lengths]),
        "layer_index": np.arange(layers) + 1,
        "num_experts": experts,
        "metadata": {"model": "made-up", "source": "synthetic"},
        "labels": tuple(f"text {s}" for s in range(len(lengths))),
    }
    return RoutingTrace(**{**fields, **changes})


def rows(trace: RoutingTrace, *order: Any, prompts: Any = None) -> RoutingTrace:
    """The trace with these rows for each sequence."""
    taken = [np.asarray(one) for one in order]
    kept = trace.prompt_len if prompts is None else prompts
    return trace.take_rows(taken, kept, trace.labels if trace.labels and len(taken) == len(trace.labels) else None)


def found(trace: RoutingTrace) -> dict[str, str]:
    return {one.defect: one.found for one in check(trace)}


def mended(trace: RoutingTrace, name: str) -> RoutingTrace:
    """The trace without the defect, which was there and is gone."""
    assert name in found(trace)
    result, findings = mend(trace, [name])
    assert [one.defect for one in findings if one.mended] == [name]
    assert name not in found(result)
    assert list(result.metadata["mended"]) == [name]
    return result


def same_routing(one: RoutingTrace, other: RoutingTrace) -> None:
    """Equal but for the metadata."""
    assert replace(one, metadata=other.metadata).content_hash() == other.content_hash()


# ---- clean recordings ----


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "shape", [{"layers": 1, "top_k": 1, "experts": 4}, {}, {"layers": 24, "top_k": 8, "experts": 32}]
)
def test_clean_traces_have_no_defect(seed: int, shape: dict[str, Any]) -> None:
    assert check(made((40, 130, 65), seed=seed, **shape)) == ()
    assert found(made((40, 130, 65), seed=seed, sticky=0, **shape)) == {}


def test_the_bundled_recording_is_clean() -> None:
    assert check(RoutingTrace.load("tiny-mixtral-32l-mini")) == ()


def test_a_trace_without_weights_has_no_defect_of_weights() -> None:
    assert check(made(topk_weights=None)) == ()


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 4), st.integers(4, 40), st.integers(1, 30))
def test_checks_never_fail_and_mends_keep_to_what_is_recorded(
    seed: int, layers: int, top_k: int, experts: int, length: int
) -> None:
    """Any valid trace, with unassigned picks and few rows: checks answer, and mends give rows that were there."""
    random = np.random.default_rng(seed)
    ids = np.argsort(random.random((length, layers, experts)), axis=-1)[..., :top_k].astype(np.int16)
    ids[random.random(ids.shape) < random.choice([0, 0.3, 1])] = -1
    ids = ids[random.integers(length, size=length)] if seed % 2 else ids
    cut = int(random.integers(1, length + 1))
    trace = RoutingTrace(
        topk_ids=ids,
        topk_weights=random.random(ids.shape) if seed % 3 else None,
        sequence_offsets=sorted({0, cut, length}),
        prompt_len=[0] * (2 if cut < length else 1),
        layer_index=np.arange(layers),
        num_experts=experts,
        metadata={"model": "made-up", "source": "synthetic"},
    )
    before = {row.tobytes() for row in np.sort(trace.topk_ids, axis=-1)}
    for finding in check(trace):
        assert finding.defect in DEFECTS
        assert "\n" not in finding.found
        if finding.mend is not None and finding.defect not in ("padding", "repeated-layers"):
            result, _ = mend(trace, [finding.defect])
            assert {row.tobytes() for row in np.sort(result.topk_ids, axis=-1)} <= before


# ---- every defect ----


def test_warm_up() -> None:
    trace = made((40, 60, 30))
    dummy = made((1,), seed=9)
    damaged = joined(rows(dummy, [0] * 20), rows(dummy, [0] * 12), trace)
    assert "the first 2 sequences (32 rows)" in found(damaged)["warm-up"]
    same_routing(mended(damaged, "warm-up"), replace(trace, labels=None))


def test_a_few_equal_rows_at_the_start_are_no_warm_up() -> None:
    assert "warm-up" not in found(joined(rows(made((1,), seed=9), [0] * 7), made()))


def test_nothing_but_dummy_rows_cannot_be_mended() -> None:
    trace = rows(made((1,)), [0] * 40, prompts=[20])
    assert "nothing else is recorded" in found(trace)["warm-up"]
    with pytest.raises(TraceError, match="warm-up cannot be mended here: "):
        mend(trace, ["warm-up"])


def test_repeated_layers() -> None:
    trace = made(layers=4)
    damaged = trace.map_layers([0, 1, 2, 3, 1, 1, 2], [1, 2, 3, 4, 10, 11, 12])
    assert found(damaged)["repeated-layers"] == "3 model layers copy another: 10 of 2, 11 of 2, 12 of 3"
    same_routing(mended(damaged, "repeated-layers"), trace)


def test_layers_that_nearly_agree_are_copies_and_constant_ones_are_not() -> None:
    trace = made((400,), layers=2)
    ids = np.array(trace.topk_ids)
    ids[:, 1] = ids[:, 0]
    ids[::150, 1] = (ids[::150, 1] + 1) % 16
    assert "repeated-layers" in found(replace(trace, topk_ids=ids))
    ids[::20, 1] = (ids[::20, 0] + 1) % 16
    assert "repeated-layers" not in found(replace(trace, topk_ids=ids))
    ids[:] = [0, 1]
    assert "repeated-layers" not in found(replace(trace, topk_ids=ids))


@pytest.mark.parametrize("batch", [2, 3, 5, 16])
def test_interleaved(batch: int) -> None:
    trace = made((32,) * batch + (48,) * batch, layers=12, prompt_len=[8] * batch + [12] * batch, labels=None)
    turns = [np.arange(first * 32, (first + 1) * 32 * batch).reshape(batch, -1)[:, :32].T.ravel() for first in range(1)]
    second = np.arange(32 * batch, 80 * batch).reshape(batch, 48).T.ravel()
    damaged = rows(trace, *turns, second, prompts=[8 * batch, 12 * batch])
    assert f"rows of {batch} sequences take turns" in found(damaged)["interleaved"]
    same_routing(mended(damaged, "interleaved"), trace)


def test_interleaved_rows_that_do_not_divide_are_reported_and_left() -> None:
    trace = made((64, 64), layers=12, labels=None)
    turns = np.arange(128).reshape(2, 64).T.ravel()
    damaged = rows(trace, turns[:-1], prompts=[40])
    assert "2 does not divide" in found(damaged)["interleaved"]
    with pytest.raises(TraceError, match="interleaved cannot be mended here"):
        mend(damaged, ["interleaved"])


def test_a_rhythm_of_some_texts_is_no_interleaving() -> None:
    trace = made((90, 90, 90, 90))
    beat = np.array(trace.topk_ids)
    beat[0:90:3, :3] = beat[0, :3]  # every third token of one text alike in half of the layers
    assert "interleaved" not in found(replace(trace, topk_ids=beat))


def test_weight_order() -> None:
    trace = made()
    damaged = replace(trace, topk_ids=trace.topk_ids[..., ::-1], topk_weights=trace.topk_weights[..., ::-1])
    assert found(damaged)["weight-order"].startswith("100 % of the lists of picks")
    same_routing(mended(damaged, "weight-order"), trace)


def test_unassigned_picks_go_last_and_equal_weights_keep_their_order() -> None:
    ids = np.array([[[3, -1, 1, 2]], [[0, 1, 2, 3]]])
    weights = np.array([[[0.0, 0.0, 0.5, 0.5]], [[0.25, 0.25, 0.25, 0.25]]], np.float32)
    trace = made((2,), layers=1, topk_ids=ids, topk_weights=weights)
    result, _ = mend(trace, ["weight-order"])
    np.testing.assert_array_equal(result.topk_ids[:, 0], [[1, 2, 3, 255], [0, 1, 2, 3]])
    np.testing.assert_array_equal(result.topk_weights[0, 0], [0.5, 0.5, 0, 0])


def test_unnormalised_weights() -> None:
    trace = made()
    weights = np.array(trace.topk_weights) * 2.5
    weights[3, 0] = 0
    damaged = replace(trace, topk_weights=weights, metadata={**trace.metadata, "weight_rule": "softmax"})
    assert "sum to 0 to 2.5" in found(damaged)["unnormalised-weights"]
    assert (
        "sum to 2.5 " in found(replace(trace, topk_weights=np.array(trace.topk_weights) * 2.5))["unnormalised-weights"]
    )
    result, findings = mend(damaged, ["unnormalised-weights"])
    assert "1 list of zeros" in str(findings[0].mend)
    assert trace.topk_weights is not None
    weights = np.array(trace.topk_weights)
    weights[3, 0] = 0
    np.testing.assert_allclose(result.topk_weights, weights, rtol=1e-6, atol=0)
    assert result.metadata["weight_rule"] == "softmax, then divided by their sum"


def test_weights_of_16_bits_are_normalised() -> None:
    weights = np.array(made().topk_weights)
    assert check(made(topk_weights=weights.astype(np.float16))) == ()
    coarse = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # bfloat16, cut off
    assert check(made(topk_weights=coarse)) == ()


def test_padding_of_layers_slots_and_rows() -> None:
    trace = made((40, 30), layers=3, experts=16)
    ids = np.full((80, 5, 4), -1)
    weights = np.zeros((80, 5, 4), np.float32)
    kept = np.r_[0:40, 45:75]
    ids[np.ix_(kept, [1, 2, 4], [0, 1])] = trace.topk_ids
    weights[np.ix_(kept, [1, 2, 4], [0, 1])] = trace.topk_weights
    damaged = made(
        (40, 40),
        topk_ids=ids,
        topk_weights=weights,
        layer_index=np.array([0, 1, 2, 9, 3]).cumsum(),
        prompt_len=[20, 20],
    )
    text = found(damaged)["padding"]
    assert text.startswith("2 layers without a pick (model layers 0, 12); 2 pick slots that no token uses; 10 rows")
    result = mended(damaged, "padding")
    np.testing.assert_array_equal(result.topk_ids, trace.topk_ids)
    np.testing.assert_array_equal(result.layer_index, [1, 3, 15])
    np.testing.assert_array_equal(result.sequence_lengths, [40, 30])
    np.testing.assert_array_equal(result.prompt_len, [20, 15])


def test_left_and_right_padding_of_prompts() -> None:
    trace = made((40, 60), layers=12, prompt_len=[40, 30])
    pad = np.zeros(12, int) + 5  # any row, many times over
    damaged = rows(trace, np.r_[0:40, pad], np.r_[pad + 40, 40:100], prompts=[52, 42])
    assert found(damaged)["padding"] == "24 rows at an end of a prompt that all repeat one row"
    same_routing(mended(damaged, "padding"), trace)
    # At the end of decode steps it is a loop.
    assert "padding" not in found(rows(trace, np.r_[0:40, pad], np.r_[40:100], prompts=[20, 30]))


def test_single_unassigned_picks_are_counted_and_stay() -> None:
    ids = np.array(made().topk_ids)
    ids[5, 2, 1] = 255
    trace = made(topk_ids=ids)
    finding = next(one for one in check(trace) if one.defect == "padding")
    assert finding.found.startswith("1 pick unassigned where others of the token are assigned")
    assert finding.mend is None


def test_physical_ids() -> None:
    named = {"model": "mixtral-8x7b", "source": "recorded"}
    assert "16 experts a layer, mixtral-8x7b has 8" in found(made(metadata=named))["physical-ids"]
    assert "physical-ids" not in found(made(experts=8, metadata=named))
    stated = {"model": "made-up", "source": "recorded", "num_experts": 12}
    assert "made-up has 12" in found(made(metadata=stated))["physical-ids"]
    slots = {"model": "made-up", "source": "recorded", "id_space": "physical"}
    with pytest.raises(
        TraceError, match=r"physical-ids cannot be mended here: .*not this trace.*--expert-map, of the formats sglang"
    ):
        mend(made(metadata=slots), ["physical-ids"])


def test_missing_phase() -> None:
    trace = made((20, 30, 40), prompt_len=[0, 10, 40])
    expected = "1 of 3 sequences without a prefill and 1 of 3 sequences without decode steps"
    assert found(trace)["missing-phase"] == expected
    same_routing(mended(trace, "missing-phase"), trace.sequences([1]))
    with pytest.raises(TraceError, match="missing-phase cannot be mended"):
        mend(made(prompt_len=[0, 0]), ["missing-phase"])


@pytest.mark.parametrize("period", [1, 3, 20])
def test_looping(period: int) -> None:
    trace = made((100, 90), layers=12)
    loop = np.r_[0:100, np.tile(np.arange(100 - period, 100), -(-60 // period))]
    damaged = rows(trace, loop, np.arange(100, 190))
    repeated = len(loop) - 100
    assert (
        f"1 sequence (number 0) repeats itself to the end with a period of {period} rows" in found(damaged)["looping"]
    )
    assert f"{repeated} rows in all" in found(damaged)["looping"]
    same_routing(mended(damaged, "looping"), trace)


def test_a_loop_need_not_repeat_exactly_but_has_to_last_to_the_end() -> None:
    trace = made((100,), layers=24)
    loop = np.r_[0:100, np.tile(np.arange(94, 100), 10)]
    noisy = np.array(rows(trace, loop).topk_ids)
    random = np.random.default_rng(3)
    noisy[100:][random.random((60, 24)) < 0.1] = [0, 1]
    damaged = replace(rows(trace, loop), topk_ids=noisy)
    assert "period of 6 rows" in found(damaged)["looping"]
    goes_on = rows(trace, np.r_[loop, 0:30])
    assert "looping" not in found(goes_on)
    in_the_prompt = replace(damaged, prompt_len=np.array([damaged.num_tokens]))
    assert "looping" not in found(in_the_prompt)


def test_an_exact_loop_is_nothing_but_a_loop() -> None:
    trace = made(layers=12)
    for period in (2, 6, 20):
        order = np.concatenate([np.arange(60), np.tile(np.arange(60 - period, 60), 8 + 64 // period)])
        damaged = rows(trace, order, np.arange(60, 140), prompts=[20, 40])
        assert set(found(damaged)) == {"looping"}
        assert "interleaved" not in found(mended(damaged, "looping"))


def test_rows_that_stand_twice() -> None:
    trace = made()
    damaged = rows(trace, np.repeat(np.arange(60), 2), np.repeat(np.arange(60, 140), 3), prompts=[60, 120])
    assert found(damaged)["duplicate-tokens"].startswith("220 rows that only repeat the row before")
    same_routing(mended(damaged, "duplicate-tokens"), trace)


def test_one_row_that_is_recorded_twice() -> None:
    trace = made(layers=16, top_k=4)
    damaged = rows(trace, np.r_[0:20, 19:60], np.arange(60, 140), prompts=[31, 40])
    assert found(damaged)["duplicate-tokens"] == "1 row that only repeats the row before"
    same_routing(mended(damaged, "duplicate-tokens"), trace)
    # With few picks two tokens may well be alike, and longer runs are of another kind.
    assert "duplicate-tokens" not in found(rows(made(layers=8), np.r_[0:20, 19:60], np.arange(60, 140)))
    assert "duplicate-tokens" not in found(rows(trace, np.r_[0:20, 19, 19, 19:60], np.arange(60, 140)))


def test_passages_that_are_recorded_again() -> None:
    trace = made(layers=12)
    damaged = rows(trace, np.r_[0:30, 0:30, 30:60], np.arange(60, 140), prompts=[60, 40])
    assert found(damaged)["duplicate-tokens"] == "30 rows of passages that are recorded again in their sequence"
    same_routing(mended(damaged, "duplicate-tokens"), trace)


def test_sequences_that_are_recorded_again() -> None:
    trace = made()
    damaged = trace.sequences([0, 1, 0])
    assert found(damaged)["duplicate-tokens"] == "1 sequence that equals an earlier one"
    same_routing(mended(damaged, "duplicate-tokens"), trace)
    other = np.array(damaged.topk_weights)
    other[-1] = [0.5, 0.5]
    assert "duplicate-tokens" not in found(replace(damaged, topk_weights=other))


# ---- several at once ----


def joined(*traces: RoutingTrace) -> RoutingTrace:
    """The sequences of several traces, one after the other."""

    def every(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(one, name) for one in traces])

    return replace(
        traces[-1],
        topk_ids=every("topk_ids"),
        topk_weights=every("topk_weights"),
        sequence_offsets=np.append(0, np.cumsum(every("sequence_lengths"))),
        prompt_len=every("prompt_len"),
        labels=None,
    )


def test_only_what_is_named_is_mended() -> None:
    trace = made(layers=4)
    damaged = replace(trace, topk_weights=np.array(trace.topk_weights)[..., ::-1] * 3).map_layers([0, 1, 2, 3, 0])
    assert set(found(damaged)) == {"repeated-layers", "weight-order", "unnormalised-weights"}
    result, findings = mend(damaged, ["weight-order", "looping"])
    assert {one.defect: one.mended for one in findings} == {
        "repeated-layers": False,
        "weight-order": True,
        "unnormalised-weights": False,
    }
    assert set(found(result)) == {"repeated-layers", "unnormalised-weights"}
    again, _ = mend(result, found(result))
    assert check(again) == ()
    assert set(again.metadata["mended"]) == set(found(damaged))


def test_nothing_to_mend_changes_nothing() -> None:
    trace = made()
    result, findings = mend(trace, list(DEFECTS))
    assert result is trace
    assert findings == ()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["loping"], "did you mean looping"),
        ([7], "no defect is called 7"),
        ("looping", "a list of names"),
        (None, "a list of names"),
        ([""], "no defect is called ''"),
        (["a\nb"], r"a\\nb"),
    ],
)
def test_wrong_names(names: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        mend(made(), names)


def test_every_defect_has_a_check_and_a_finding_of_one_line() -> None:
    from perfmodel.routing.defects import _checks

    assert set(_checks()) == set(DEFECTS)
    assert Finding("looping", "seen").mend is None


# ---- real recordings ----


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("traces/deepseek-v2-lite/esft_law.npz", {"weight-order", "unnormalised-weights"}),
        ("traces/deepseek-v2-lite/esft_translation.npz", {"weight-order", "unnormalised-weights"}),
        ("traces/gpt-oss-20b/gptoss20b_decode.npz", {"missing-phase", "looping"}),
        ("tiny-mixtral/tiny-mixtral-32l.npz", set()),
    ],
)
def test_recordings_of_others(shared: Path, file: str, expected: set[str]) -> None:
    trace = RoutingTrace.load(shared / file)
    assert set(found(trace)) == expected
    if "looping" in expected:
        assert "number 17) repeats itself to the end with a period of 2 rows" in found(trace)["looping"]


# ---- command ----


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    trace = made()
    replace(trace, topk_weights=np.array(trace.topk_weights) * 0.5).map_layers([0, 1, 0]).save(tmp_path / "in.npz")
    return tmp_path / "in.npz"


def test_check_command(damaged: Path, tmp_path: Path) -> None:
    answer = run("trace", "check", damaged)
    assert answer.code == 0
    assert "unnormalised-weights: weights of 100 % of the lists of picks sum to 0.5" in answer.out
    assert "--mend repeated-layers would leave out 1 layer and keep 0, 1" in answer.out
    document = run("trace", "check", damaged, "--json").document
    assert [one["defect"] for one in document["findings"]] == ["repeated-layers", "unnormalised-weights"]
    out = tmp_path / "out.npz"
    answer = run("trace", "check", damaged, "--mend", "repeated-layers, unnormalised-weights", "-o", out)
    assert "mended: leave out 1 layer" in answer.out
    assert check(RoutingTrace.load(out)) == ()
    assert run("trace", "check", out).out == "no defect found\n"
    for name in DEFECTS:
        answer = run("trace", "check", out, "--mend", name, "-o", tmp_path / "same.npz", "--overwrite")
        assert answer.code == 0
        assert answer.err == f"nothing to mend: no {name} found\nwrote {tmp_path / 'same.npz'}\n"
    assert run("trace", "check", "tiny-mixtral-32l-mini").out == "no defect found\n"


def test_check_command_refusals(damaged: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    start = ("trace", "check", damaged)
    check_refusal(run(*start, "--mend", "loping", "-o", out), "--mend", "did you mean looping")
    check_refusal(run(*start, "--mend", "looping"), "--mend: needs -o too")
    check_refusal(run(*start, "-o", out), "-o: needs --mend too")
    check_refusal(run(*start, "--overwrite"), "--overwrite: needs -o")
    check_refusal(run(*start, "--mend", "looping", "-o", tmp_path / "out.txt"), "ends in .npz")
    check_refusal(run(*start, "--mend", "looping", "-o", damaged), "exists", "--overwrite")
    check_refusal(run("trace", "check", tmp_path / "none.npz"), "no such file")
    (tmp_path / "table.npz").write_bytes(b"something else")
    check_refusal(run(*start, "--mend", "looping", "-o", tmp_path / "table.npz", "--overwrite"), "is no trace")
    assert not out.exists()
    assert json.loads(run(*start, "--json").out)["out"] is None
    assert run(*start, "--mend", "repeated-layers", "-o", damaged, "--overwrite").code == 0
    assert "repeated-layers" not in found(RoutingTrace.load(damaged))
