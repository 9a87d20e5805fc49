"""The survey against plain loops, against the statistics of traces in memory, and against published figures."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import plain_survey as plain
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace, blocks
from perfmodel.routing.statistics import (
    Survey,
    adjacent_overlap,
    entropy,
    gini,
    hit_rate_controls,
    load_cosine,
    selection_counts,
    survey,
    tables,
    top_experts,
)
from perfmodel.routing.statistics.resample import Resampler

Array = np.ndarray[Any, Any]
DRIFT_ROWS = 3


def make_trace(ids: Array, lengths: list[int], prompts: list[int], experts: int, weights: Any = None) -> RoutingTrace:
    """A trace of [tokens, layers, k] picks."""
    return RoutingTrace(
        topk_ids=ids,
        topk_weights=weights,
        sequence_offsets=np.cumsum([0, *lengths]),
        prompt_len=np.array(prompts),
        layer_index=np.arange(ids.shape[1]),
        num_experts=experts,
        metadata={"model": "toy", "source": "recorded"},
    )


@st.composite
def traces(draw: st.DrawFn, phases: str = "any") -> RoutingTrace:
    """Small traces of ragged sequences that favour some experts, some with unassigned picks or a missing phase."""
    top_k = draw(st.integers(1, 3))
    experts = draw(st.integers(top_k, 6))
    layers = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    favour = draw(st.sampled_from([0.0, 1.0])) * rng.random((layers, experts))
    ids = (rng.random((sum(lengths), layers, experts)) + favour).argsort(-1)[..., :top_k]
    if draw(st.booleans()):
        ids[rng.random(ids.shape) < 0.3] = -1
    kind = draw(st.sampled_from(["both", "decode", "prefill"])) if phases == "any" else phases
    prompts = {"both": [draw(st.integers(0, one)) for one in lengths], "decode": [0] * len(lengths), "prefill": lengths}
    weights = rng.random(ids.shape) if draw(st.booleans()) else None
    return make_trace(ids, lengths, prompts[kind], experts, weights)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small examples have several windows of drift and, where a test asks for it, several blocks."""
    if "shared" in request.fixturenames:
        return
    monkeypatch.setattr(tables, "DRIFT_ROWS", DRIFT_ROWS)


def look(trace: RoutingTrace, block_rows: int = 4, **options: Any) -> Survey:
    """A survey with short blocks, so that sequences are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perfmodel.routing.blocks.BLOCK_ROWS", block_rows)
        return survey(trace, **{"min_decode": 2, "resamples": 20, "lags": (1, 2, 5), "windows": (1, 3), **options})


def scopes_of(trace: RoutingTrace) -> list[str]:
    """Scopes with rows."""
    return ["all", *(name for name in ("prefill", "decode") if trace.phase(name).any())]  # type: ignore[arg-type]


@given(traces(), st.integers(1, 9))
def test_reuse_and_windows(trace: RoutingTrace, block_rows: int) -> None:
    found = look(trace, block_rows)
    everything = list(range(trace.num_layers))
    assert list(found.reuse) == list(found.distinct) == list(found.skew) == scopes_of(trace)
    for scope in scopes_of(trace):
        for i, lag in enumerate((1, 2, 5)):
            measured = found.reuse[scope].measured  # type: ignore[index]
            assert_allclose(measured.overall.value[i], plain.reuse(trace, scope, lag, everything), rtol=1e-12, atol=0)
            by_layer = [plain.reuse(trace, scope, lag, [layer]) for layer in everything]
            assert_allclose(measured.layers.value[:, i], by_layer, rtol=1e-12, atol=0)
        by_chance = found.reuse[scope].chance  # type: ignore[index]
        assert_allclose(by_chance.overall.value, plain.chance(trace, scope, everything), rtol=1e-12, atol=0)
        by_layer = [plain.chance(trace, scope, [layer]) for layer in everything]
        assert_allclose(by_chance.layers.value, by_layer, rtol=1e-12, atol=0)
        for i, window in enumerate((1, 3)):
            different = found.distinct[scope]  # type: ignore[index]
            wanted = plain.distinct(trace, scope, window, everything)
            assert_allclose(different.overall.value[i], wanted, rtol=1e-12, atol=0)
            by_layer = [plain.distinct(trace, scope, window, [layer]) for layer in everything]
            assert_allclose(different.layers.value[:, i], by_layer, rtol=1e-12, atol=0)


@given(traces(), st.integers(1, 9))
def test_skew_and_weights(trace: RoutingTrace, block_rows: int) -> None:
    found = look(trace, block_rows)
    for scope in scopes_of(trace):
        picks = sum(plain.counts_of(trace, rows) for rows in plain.spans(trace, scope))
        skew = found.skew[scope]  # type: ignore[index]
        assert_array_equal(skew.picks, picks)
        for measure, name in ((gini, "gini"), (entropy, "entropy")):
            assert_allclose(getattr(skew, name).layers.value, measure(picks), rtol=1e-12, atol=1e-15)
        for layer, counts in enumerate(picks):
            if counts.sum():
                assert_allclose(skew.shares[layer], counts / counts.sum(), rtol=1e-15, atol=0)
                half = sorted(counts, reverse=True)[: len(counts) // 2]
                assert_allclose(skew.top_half.layers.value[layer], sum(half) / counts.sum(), rtol=1e-12, atol=0)
            else:
                assert np.isnan(skew.shares[layer]).all()
        known = picks.sum(-1) > 0
        if known.any():
            assert_allclose(skew.gini.overall.value, gini(picks)[known].mean(), rtol=1e-12, atol=1e-15)
    if trace.topk_weights is None:
        assert found.weights is None
        assert any("no gate weights" in note for note in found.notes)
    else:
        assert found.weights is not None
        wanted = plain.weights_by_rank(trace, list(range(trace.num_layers)))
        assert_allclose(found.weights.overall.value, wanted, rtol=1e-12, atol=0)
        by_layer = [plain.weights_by_rank(trace, [layer]) for layer in range(trace.num_layers)]
        assert_allclose(found.weights.layers.value, by_layer, rtol=1e-12, atol=0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_measures_of_skew(counts: list[int]) -> None:
    found, spread = float(gini(counts)), float(entropy(counts))
    total = sum(counts)
    if not total:
        assert math.isnan(found)
        assert math.isnan(spread)
        return
    pairs = sum(abs(a - b) for a in counts for b in counts)
    assert_allclose(found, pairs / (2 * len(counts) * total), rtol=1e-12, atol=1e-15)
    if len(counts) > 1:
        bits = -sum(n / total * math.log(n / total) for n in counts if n)
        assert_allclose(spread, bits / math.log(len(counts)), rtol=1e-12, atol=1e-15)


@given(traces(), st.integers(1, 9))
def test_next_layer(trace: RoutingTrace, block_rows: int) -> None:
    found = look(trace, block_rows).next_layer
    if trace.num_layers < 2 or trace.num_sequences < 2:
        assert found is None
        return
    assert found is not None
    told = np.array([plain.next_layer(trace, layer) for layer in range(trace.num_layers - 1)], float)
    with np.errstate(invalid="ignore"):
        for part, column in ((found.recall, 0), (found.popular, 1)):
            assert_allclose(part.layers.value, told[:, column] / told[:, 2], rtol=1e-12, atol=0)
            assert_allclose(part.overall.value, told[:, column].sum() / told[:, 2].sum(), rtol=1e-12, atol=0)


def test_next_layer_of_a_recording() -> None:
    trace = recording().sequences([0, 3, 4]).map_layers([3, 17, 25])
    found = survey(trace, resamples=0).next_layer
    assert found is not None
    told = np.array([plain.next_layer(trace, layer) for layer in range(2)], float)
    assert_allclose(found.recall.layers.value, told[:, 0] / told[:, 2], rtol=1e-12, atol=0)
    assert_allclose(found.popular.layers.value, told[:, 1] / told[:, 2], rtol=1e-12, atol=0)


@given(traces(), st.integers(1, 9), st.integers(1, 4))
def test_hit_rates_and_similarity(trace: RoutingTrace, block_rows: int, min_decode: int) -> None:
    found = look(trace, block_rows, min_decode=min_decode)
    cut = plain.split_spans(trace)
    halves = not trace.prompt_len.any()
    assert found.reference == ("first half" if halves else "prefill")
    usable = [
        s
        for s, (before, after) in enumerate(cut)
        if len(before)
        and len(after) >= min_decode
        and plain.counts_of(trace, before).any()
        and plain.counts_of(trace, after).any()
    ]
    if not usable:
        assert found.similarity is None
        assert found.hit_rates is None
        return
    part = trace.sequences(usable)
    part = make_trace(
        part.topk_ids.astype(int) + np.where(part.topk_ids == part.unassigned, -1 - part.unassigned, 0),
        part.sequence_lengths.tolist(),
        [len(cut[s][0]) for s in usable],
        trace.num_experts,
    )
    similarity, rates = found.similarity, found.hit_rates
    assert similarity is not None
    assert similarity.sequences == len(usable)
    prefill, decode = (selection_counts(part, name).astype(float) for name in ("prefill", "decode"))  # type: ignore[arg-type]
    assert_allclose(similarity.cosine.layers.value, load_cosine(part), rtol=1e-12, atol=0)
    cosines: dict[str, list[float]] = {"other": [], "uniform": []}
    for s, layer in itertools.product(range(len(usable)), range(trace.num_layers)):
        if not (prefill[s, layer].any() and decode[s, layer].any()):
            continue
        others = [o for o in range(len(usable)) if o != s and prefill[o, layer].any()]
        if others:
            each = [plain.cosine(prefill[o, layer], decode[s, layer]) for o in others]
            cosines["other"].append(float(np.mean(each)))
        cosines["uniform"].append(plain.cosine(np.ones(trace.num_experts), decode[s, layer]))
    if cosines["uniform"]:
        assert_allclose(similarity.uniform.overall.value, np.mean(cosines["uniform"]), rtol=1e-12, atol=0)
    if len(cosines["other"]) == len(cosines["uniform"]) > 0:
        assert_allclose(similarity.other_sequence.overall.value, np.mean(cosines["other"]), rtol=1e-9, atol=1e-12)
    if trace.num_experts == 1:
        assert rates is None
        return
    assert rates is not None
    assert rates.gpu_experts.tolist() == list(range(1, trace.num_experts))
    for i, count in enumerate(rates.gpu_experts):
        wanted = hit_rate_controls(part, int(count), prefill)
        assert rates.uniform[i] == wanted.uniform
        if len(usable) > 1:
            static = plain.static_hit_rate(decode, int(count))
            assert_allclose(rates.static.value[i], static, rtol=1e-9, atol=1e-10)
        for name in ("own", "other_sequence", "static_pooled", "oracle"):
            value = getattr(wanted, name)
            assert_allclose(
                getattr(rates, name).value[i], np.nan if value is None else value, rtol=1e-9, atol=1e-10, err_msg=name
            )
        both = prefill.any(-1) & decode.any(-1)
        shared = (top_experts(prefill, int(count)) & top_experts(decode, int(count))).sum(-1) / count
        if both.any():
            assert_allclose(similarity.overlap.value[i], shared[both].mean(), rtol=1e-12, atol=1e-15)
    half = trace.num_experts // 2
    for layer in range(trace.num_layers):
        one = part.map_layers([layer])
        if half and decode[:, layer].any():
            wanted = hit_rate_controls(one, half, prefill[:, [layer]])
            for name in ("own", "oracle", "static_pooled", "other_sequence"):
                value = getattr(wanted, name)
                if value is not None and decode[:, layer].any(-1).all():
                    assert_allclose(rates.layers[name].value[layer], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_sequences_that_pick_nothing_on_one_side_are_left_out() -> None:
    rng = np.random.default_rng(0)
    ids = rng.random((50, 2, 5)).argsort(-1)[..., :2]
    whole = look(make_trace(ids[:30], [10, 10, 10], [4, 5, 6], 5)).hit_rates
    ids[30:34] = ids[44:] = -1
    found = look(make_trace(ids, [10] * 5, [4, 5, 6, 4, 4], 5))
    assert whole is not None
    assert found.hit_rates is not None
    assert found.hit_rates.sequences == 3
    assert any("2 of 5 sequences" in note for note in found.notes)
    for name in ("own", "other_sequence", "static", "static_pooled", "oracle"):
        # The same picks, added up in other groups.
        assert_allclose(getattr(found.hit_rates, name).value, getattr(whole, name).value, rtol=1e-12, atol=0)


@given(traces(), st.integers(1, 9))
def test_drift(trace: RoutingTrace, block_rows: int) -> None:
    found = look(trace, block_rows).drift
    longest = max((len(after) for before, after in plain.split_spans(trace) if len(before)), default=0)
    if longest < DRIFT_ROWS:
        assert found is None
        return
    assert found is not None
    assert found.first_row.tolist() == [DRIFT_ROWS * i for i in range(longest // DRIFT_ROWS)]
    for i in range(len(found.first_row)):
        cosine, hits, sequences = plain.drift(trace, i, DRIFT_ROWS)
        assert found.sequences[i] == sequences
        assert_allclose(found.cosine.value[i], cosine, rtol=1e-12, atol=0)
        assert_allclose(found.hit_rate.value[i], hits, rtol=1e-12, atol=0)


@given(traces(), st.integers(1, 9))
def test_cache_curves(trace: RoutingTrace, block_rows: int) -> None:
    found = look(trace, block_rows).cache
    if not trace.phase("decode").any():
        assert found is None
        return
    assert found is not None
    assert found.restart == block_rows
    everything = list(range(trace.num_layers))
    for capacity in range(1, trace.num_experts + 1):
        for part, layers, rule in (
            (found.lru, found.lru_layers, plain.keeps_latest),
            (found.belady, found.belady_layers, plain.keeps_soonest),
        ):
            wanted = plain.cache_rate(trace, capacity, block_rows, everything, rule)
            assert_allclose(part.value[capacity - 1], wanted, rtol=1e-12, atol=0)
            by_layer = [plain.cache_rate(trace, capacity, block_rows, [layer], rule) for layer in everything]
            assert_allclose(layers[:, capacity - 1], by_layer, rtol=1e-12, atol=0)


@given(traces(phases="both"), st.integers(1, 9))
def test_batches(trace: RoutingTrace, block_rows: int) -> None:
    found = look(trace, block_rows, batches=range(1, 8)).batches
    decode = [rows for rows in plain.spans(trace, "decode") if len(rows)]
    if not decode:
        assert found is None
        return
    assert found is not None
    assert found.sequences == len(decode)
    assert found.sizes.tolist() == list(range(1, len(decode) + 1))
    for i, size in enumerate(found.sizes):
        means = []
        for batch in itertools.combinations(decode, int(size)):
            sets = [
                len({e for row in step for e in plain.chosen(trace, row, layer)})
                for step in zip(*batch, strict=False)
                for layer in range(trace.num_layers)
            ]
            means.append(np.mean(sets))
        assert min(means) - 1e-12 <= found.distinct[i] <= max(means) + 1e-12
        assert_allclose(found.layers[:, i].mean(), found.distinct[i], rtol=1e-12, atol=0)
    assert_allclose(found.distinct[-1], means[0], rtol=1e-12, atol=0)
    everyone = [plain.chosen(trace, row, layer) for rows in decode for row in rows for layer in range(trace.num_layers)]
    assert_allclose(found.distinct[0], np.mean([len(one) for one in everyone]), rtol=1e-12, atol=0)


def recording() -> RoutingTrace:
    """Six sequences, 32 layers, 2 of 8 experts."""
    return RoutingTrace.load("tiny-mixtral-32l-mini")


def test_intervals_are_those_of_resampled_traces() -> None:
    trace = recording().map_layers([3, 17])
    resamples, seed = 40, 5
    found = survey(trace, lags=[2], resamples=resamples, seed=seed)
    rng = np.random.default_rng(seed)
    again = [trace.sequences(rng.integers(0, 6, 6)) for _ in range(resamples)]
    reuse = np.array([adjacent_overlap(one, "decode", 2).measured for one in again])
    wanted = np.percentile(reuse, [2.5, 97.5], axis=0)
    measured = found.reuse["decode"].measured
    assert_allclose(measured.layers.low[:, 0], wanted[0], rtol=1e-12, atol=0)
    assert_allclose(measured.layers.high[:, 0], wanted[1], rtol=1e-12, atol=0)
    # Both layers have equally many picks, so all picks together are the mean.
    wanted = np.percentile(reuse.mean(1), [2.5, 97.5])
    assert_allclose((measured.overall.low[0], measured.overall.high[0]), wanted, rtol=1e-12, atol=0)
    cosine = np.percentile([load_cosine(one).mean() for one in again], [2.5, 97.5])
    assert found.similarity is not None
    assert_allclose(found.similarity.cosine.overall[1:], cosine, rtol=1e-12, atol=0)
    skew = np.percentile([gini(selection_counts(one, "decode").sum(0)).mean() for one in again], [2.5, 97.5])
    assert_allclose(found.skew["decode"].gini.overall[1:], skew, rtol=1e-12, atol=0)


def test_intervals_leave_out_resamples_without_anything_to_count() -> None:
    resampler = Resampler(3, 200, 0)
    value, low, high = resampler.ratio(np.array([1, 0, 2]), np.array([4, 0, 4]))
    assert value == 3 / 8
    assert (low, high) == (1 / 4, 1 / 2)
    value, low, high = resampler.ratio(np.zeros((3, 2)), np.zeros((3, 2)))
    assert np.isnan([value, low, high]).all()


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(200):
        picks = rng.integers(20, 60, 40)
        hits = rng.binomial(picks, 0.3)
        _, low, high = Resampler(40, 300, seed).ratio(hits, picks)
        inside += low <= 0.3 <= high
    assert 175 <= inside <= 198


def test_one_sequence_has_no_interval_and_no_others() -> None:
    found = look(recording().sequences([0]))
    assert np.isnan(found.reuse["all"].measured.overall.low).all()
    assert found.hit_rates is not None
    assert np.isfinite(found.hit_rates.own.value).all()
    for name in ("other_sequence", "static", "static_pooled"):
        assert np.isnan(getattr(found.hit_rates, name).value).all()
        assert np.isnan(found.hit_rates.layers[name].value).all()
    assert found.similarity is not None
    assert np.isnan(found.similarity.other_sequence.layers.value).all()
    assert found.next_layer is None
    assert any("single sequence" in note for note in found.notes)


def test_seeds() -> None:
    one, again, other = (survey(recording(), resamples=50, seed=seed).as_dict() for seed in (1, 1, 2))
    assert one == again
    assert one["reuse"] != other["reuse"]
    assert one["reuse"]["all"]["measured"]["overall"]["value"] == other["reuse"]["all"]["measured"]["overall"]["value"]


def test_many_sequences_are_resampled_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = survey(recording(), resamples=50)
    monkeypatch.setattr(tables, "MAX_GROUPS", 3)
    found = survey(recording(), resamples=50)
    assert (alone.groups, found.groups) == (6, 3)
    assert any("3 random groups" in note for note in found.notes)
    for name in ("own", "other_sequence", "static", "oracle"):
        one, two = getattr(alone.hit_rates, name), getattr(found.hit_rates, name)
        assert_allclose(one.value, two.value, rtol=1e-12, atol=0)
        assert (two.low <= two.value).all()
        assert (two.value <= two.high).all()
    assert_array_equal(alone.skew["all"].picks, found.skew["all"].picks)


def test_very_many_experts_are_placed_at_fewer_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    every = survey(recording(), resamples=0).hit_rates
    monkeypatch.setattr(tables, "TABLE_BYTES", 8 * 32 * 8 * 3)
    few = survey(recording(), resamples=0).hit_rates
    assert every is not None
    assert few is not None
    assert few.gpu_experts.tolist() == [1, 4, 7]
    for name in ("own", "other_sequence", "static", "static_pooled", "oracle"):
        assert_allclose(getattr(few, name).value, getattr(every, name).value[[0, 3, 6]], rtol=1e-12, atol=0)
        assert_allclose(few.layers[name].value, every.layers[name].value, rtol=1e-12, atol=0)


def test_large_tables_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAIR_BYTES", 100)
    found = survey(recording(), resamples=0)
    assert found.next_layer is None
    assert any("too large" in note for note in found.notes)
    monkeypatch.setattr(tables, "BATCH_PICKS", 64 * 64 * 5)
    shorter = survey(recording(), resamples=0)
    assert shorter.batches is not None
    assert shorter.batches.steps == 5
    monkeypatch.setattr(tables, "MAX_CELLS", 255)
    with pytest.raises(TraceError, match="32 layers of 8 experts are too many for a survey, at most 255"):
        survey(recording())


def test_drift_stops_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "DRIFT_WINDOWS", 2)
    found = survey(recording(), resamples=0)
    assert found.drift is not None
    assert len(found.drift.cosine.value) == 2
    assert any("first 6 rows" in note for note in found.notes)


@given(traces(), st.integers(1, 9))
def test_blocks_change_nothing_but_where_caches_start_again(trace: RoutingTrace, block_rows: int) -> None:
    cut, whole = look(trace, block_rows).as_dict(), look(trace, 1000).as_dict()
    json.dumps(cut, allow_nan=False)
    del cut["cache"], whole["cache"]
    assert cut == whole


def test_a_streamed_file_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recording()
    trace.save(tmp_path / "t.npz")
    monkeypatch.setattr(blocks, "BLOCK_PICKS", 64 * 50)
    assert blocks.open_trace(tmp_path / "t.npz").block_rows == 50
    streamed, whole = survey(tmp_path / "t.npz", resamples=20), survey(trace, resamples=20)
    assert streamed.as_dict() == whole.as_dict()
    assert streamed.cache is not None
    assert streamed.cache.restart == 50


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("lags", [0], "lags is 0, expected an integer in 1..64"),
        ("lags", [65], "lags is 65, expected an integer in 1..64"),
        ("lags", [], "lags has 0 entries"),
        ("lags", 3, "lags is 3, expected a list"),
        ("lags", ["1"], "lags is '1'"),
        ("windows", [True], "windows is True"),
        ("windows", [2**70], "windows is"),
        ("batches", [65], "batches is 65"),
        ("min_decode", 0, "min_decode is 0"),
        ("resamples", -1, "resamples is -1"),
        ("resamples", 10**9, "resamples is 1000000000"),
        ("seed", -1, "seed is -1"),
        ("seed", 1.5, "seed is 1.5"),
    ],
)
def test_numbers_that_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        survey(recording(), **{option: value})


def test_longest_lag_and_windows_longer_than_anything() -> None:
    trace = recording().map_layers([0])
    found = survey(trace, lags=[64, 63], windows=[10**9], resamples=0)
    assert found.lags.tolist() == [63, 64]
    assert_allclose(
        found.reuse["all"].measured.overall.value,
        [plain.reuse(trace, "all", lag, [0]) for lag in (63, 64)],
        rtol=1e-12,
        atol=0,
    )
    assert np.isnan(found.distinct["all"].overall.value).all()


def test_every_lag_of_an_expert_that_is_picked_rarely() -> None:
    ids = np.random.default_rng(0).integers(1, 4, 260)
    ids[[0, 63, 64, 127, 191, 192, 256, 257]] = 0  # gaps of 63, 64 and 1 meet the end of what is remembered
    trace = make_trace(ids.reshape(-1, 1, 1), [260], [0], 4)
    found = survey(trace, lags=range(1, 65), resamples=0).reuse["all"].measured.overall.value
    assert_allclose(found, [plain.reuse(trace, "all", lag, [0]) for lag in range(1, 65)], rtol=1e-12, atol=0)
    only = np.where(ids == 0, 0, -1).reshape(-1, 1, 1)
    trace = make_trace(only, [260], [0], 4)
    found = survey(trace, lags=range(1, 65), resamples=0).reuse["all"].measured.overall.value
    assert_allclose(found, [plain.reuse(trace, "all", lag, [0]) for lag in range(1, 65)], rtol=1e-12, atol=0)
    assert found[[0, 62, 63]].tolist() == [3 / 7, 2 / 7, 4 / 6]


def test_law_recording_gives_the_measured_table(shared: Path) -> None:
    found = survey(shared / "traces" / "deepseek-v2-lite" / "esft_law.npz")
    assert found.similarity is not None
    assert found.hit_rates is not None
    assert found.next_layer is not None
    assert found.weights is not None
    top = found.skew["all"].top_half
    assert round(float(top.overall.value), 3) == 0.708
    assert (round(top.layers.value.min(), 3), round(top.layers.value.max(), 3)) == (0.613, 0.764)
    assert round(float(found.skew["all"].gini.overall.value), 3) == 0.304
    reuse = found.reuse["all"]
    assert reuse.measured.overall.value.round(3).tolist() == [0.290, 0.216, 0.188, 0.171, 0.158, 0.137]
    first = reuse.measured.layers.value[:, 0]
    assert (round(first.min(), 3), round(first.max(), 3)) == (0.157, 0.348)
    assert round(float(reuse.chance.overall.value), 3) == 0.135
    assert found.distinct["all"].overall.value.round(1).tolist() == [10.3, 27.2, 50.3, 62.6]
    assert found.weights.overall.value.round(2).tolist() == [0.32, 0.21, 0.15, 0.12, 0.10, 0.09]
    assert round(float(found.next_layer.recall.overall.value), 3) == 0.538
    assert found.similarity.sequences == found.hit_rates.sequences == 31
    cosine = found.similarity.cosine
    assert round(float(cosine.overall.value), 3) == 0.795
    assert (round(cosine.layers.value.min(), 3), round(cosine.layers.value.max(), 3)) == (0.694, 0.875)
    assert round(float(found.similarity.other_sequence.overall.value), 3) == 0.788
    assert round(float(found.similarity.uniform.overall.value), 3) == 0.750
    half = 31
    assert found.hit_rates.gpu_experts[half] == 32
    assert round(float(found.similarity.overlap.value[half]), 3) == 0.661
    rates = [
        getattr(found.hit_rates, name).value[half] for name in ("own", "other_sequence", "static_pooled", "oracle")
    ]
    assert [round(float(rate), 3) for rate in rates] == [0.653, 0.648, 0.774, 0.819]


def test_decode_recording_gives_the_measured_table(shared: Path) -> None:
    found = survey(shared / "traces" / "gpt-oss-20b" / "gptoss20b_decode.npz")
    assert found.reference == "first half"
    assert found.similarity is not None
    assert found.hit_rates is not None
    assert found.drift is not None
    assert found.weights is not None
    assert found.reuse["decode"].measured.overall.value.round(3).tolist() == [0.457, 0.407, 0.381, 0.355, 0.362, 0.349]
    assert round(float(found.reuse["decode"].chance.overall.value), 3) == 0.316
    assert found.distinct["decode"].overall.value.round(1).tolist() == [6.2, 12.7, 19.5, 24.6]
    assert found.weights.overall.value.round(2).tolist() == [0.35, 0.26, 0.21, 0.17]
    assert round(float(found.similarity.cosine.overall.value), 3) == 0.920
    assert round(float(found.similarity.overlap.value[15]), 3) == 0.866
    rates = [getattr(found.hit_rates, name).value[15] for name in ("own", "oracle")]
    assert [round(float(rate), 3) for rate in rates] == [0.885, 0.921]
    assert found.drift.cosine.value[[0, 7]].round(3).tolist() == [0.889, 0.850]
