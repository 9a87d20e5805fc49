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
from scipy import stats

from perfmodel.errors import TraceError
from perfmodel.kernels import compare
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
    top_share,
)
from perfmodel.routing.statistics.intervals import Bent, Bootstrap

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
        return survey(trace, **{"min_decode": 2, "lags": (1, 2, 5), "windows": (1, 3), **options})


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
    found = survey(trace).next_layer
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
    if cosines["other"]:
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
    looked = look(trace, block_rows)
    found, notes = looked.cache, looked.notes
    if not trace.phase("decode").any():
        assert found is None
        return
    assert found is not None
    assert found.restart == block_rows
    again = [
        (rows[0] - start) // block_rows != (rows[-1] - start) // block_rows
        for start, rows in zip(trace.sequence_offsets, plain.spans(trace, "decode"), strict=False)
        if len(rows)
    ]
    assert any("start empty again" in note for note in notes) == any(again)
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
        assert min(means) - 1e-12 <= found.aligned[i] <= max(means) + 1e-12
        assert_allclose(found.layers[:, i].mean(), found.distinct[i], rtol=1e-12, atol=0)
        assert_allclose(found.aligned_layers[:, i].mean(), found.aligned[i], rtol=1e-12, atol=0)
        assert 0 <= found.distinct[i] <= min(trace.num_experts, size * trace.top_k)
    assert_allclose(found.aligned[-1], means[0], rtol=1e-12, atol=0)
    everyone = [plain.chosen(trace, row, layer) for rows in decode for row in rows for layer in range(trace.num_layers)]
    assert_allclose(found.aligned[0], np.mean([len(one) for one in everyone]), rtol=1e-12, atol=0)


def test_batches_at_any_positions() -> None:
    trace = recording().map_layers([3, 17])
    found = survey(trace, batches=[1, 3, 6]).batches
    assert found is not None
    decode = [list(rows) for rows in plain.spans(trace, "decode")]
    rng = np.random.default_rng(0)
    for i, size in enumerate((1, 3, 6)):
        sets = []
        for _ in range(3000):
            rows = [rng.choice(decode[s]) for s in rng.permutation(6)[:size]]
            sets.append([len(np.unique(trace.topk_ids[rows, layer])) for layer in range(2)])
        assert_allclose(found.layers[:, i], np.mean(sets, axis=0), rtol=0.04, atol=0)


def test_sequences_that_begin_alike_pick_fewer_experts_together_at_the_same_position() -> None:
    ids = np.tile(np.arange(24).reshape(12, 1, 2), (5, 1, 1))
    found = survey(make_trace(ids, [12] * 5, [0] * 5, 24), batches=[5]).batches
    assert found is not None
    assert found.aligned.tolist() == [2.0]
    assert_allclose(found.distinct, 24 * (1 - (11 / 12) ** 5), rtol=0.05, atol=0)


def recording() -> RoutingTrace:
    """Six sequences, 32 layers, 2 of 8 experts."""
    return RoutingTrace.load("tiny-mixtral-32l-mini")


def resampled(trace: RoutingTrace, statistic: Any, resamples: int, seed: int) -> tuple[float, float, float]:
    """A statistic of a trace, its bias and its standard error, from traces of sequences drawn with replacement."""
    rng, count = np.random.default_rng(seed), trace.num_sequences
    value = statistic(trace)
    drawn = np.array([statistic(trace.sequences(rng.integers(0, count, count).tolist())) for _ in range(resamples)])
    factor = count / (count - 1)
    return value, (drawn.mean() - value) * factor, drawn.std(ddof=1) * math.sqrt(factor)


def test_intervals_are_those_of_resampled_traces() -> None:
    trace = recording().map_layers([3, 17])
    found = survey(trace, lags=[2], resamples=25, seed=3)
    assert found.resamples == 25
    reach = stats.t.ppf(0.975, 5)
    measured, similarity, skew = found.reuse["decode"].measured, found.similarity, found.skew["decode"]
    assert similarity is not None
    for estimate, place, statistic in (
        (measured.layers, (0, 0), lambda one: adjacent_overlap(one, "decode", 2).measured[0]),
        (measured.layers, (1, 0), lambda one: adjacent_overlap(one, "decode", 2).measured[1]),
        # Both layers have equally many picks, so all picks together are the mean.
        (measured.overall, (0,), lambda one: adjacent_overlap(one, "decode", 2).measured.mean()),
        (similarity.cosine.overall, (), lambda one: load_cosine(one).mean()),
    ):
        value, _, error = resampled(trace, statistic, 25, 3)
        wanted = [value, value - reach * error, value + reach * error]
        assert_allclose([part[place] for part in estimate], wanted, rtol=1e-9, atol=0)

    def counts(one: RoutingTrace) -> Array:
        return np.asarray(selection_counts(one, "decode").sum(0))

    # On the scale where differences between sequences add up, and no less even than the value itself.
    for layered, measure, even, sign, power in (
        (skew.gini, gini, 0.0, 1, 2),
        (skew.top_half, top_share, 0.5, 1, 2),
        (skew.entropy, entropy, 1.0, -1, 1),
    ):
        for layer in (None, 0, 1):
            part = layered.overall if layer is None else layered.layers
            rows = slice(None) if layer is None else slice(layer, layer + 1)

            def bent(one: RoutingTrace, measure: Any = measure, rows: slice = rows, even: float = even) -> float:
                return float(abs(measure(counts(one))[rows].mean() - even))

            def raised(one: RoutingTrace, bent: Any = bent, power: int = power) -> float:
                return float(bent(one) ** power)

            at, bias, error = resampled(trace, raised, 25, 3)
            ends = [max(at - bias + side * reach * error, 0) ** (1 / power) for side in (-1, 1)]
            value = bent(trace)
            low, high = (even + sign * end for end in (min(ends[0], value), max(ends[1], value)))
            at_layer: Any = () if layer is None else layer
            assert_allclose(part.value[at_layer], even + sign * value, rtol=1e-9, atol=0)
            assert_allclose(sorted((low, high)), [part.low[at_layer], part.high[at_layer]], rtol=1e-9, atol=1e-12)


@given(traces())
def test_intervals_hold_the_value_and_are_possible(trace: RoutingTrace) -> None:
    found = look(trace)
    experts, top_k = trace.num_experts, trace.top_k
    half = experts // 2 / experts
    bounds: list[tuple[Any, float, Any]] = []
    for skew in found.skew.values():
        bounds += [(part, half, 1) for part in skew.top_half]
        bounds += [(part, 0, 1 - 1 / experts) for part in skew.gini] + [(part, 0, 1) for part in skew.entropy]
    for one in found.distinct.values():
        bounds += [(part, 0, np.minimum(experts, top_k * found.windows)) for part in one]
    for reuse in found.reuse.values():
        bounds += [(part, 0, 1) for part in (*reuse.measured, *reuse.chance)]
    if found.weights is not None:
        bounds += [(part, 0, 1 / np.arange(1, top_k + 1)) for part in found.weights]
    if found.cache is not None:
        bounds += [(found.cache.lru, 0, 1), (found.cache.belady, 0, 1)]
    if found.hit_rates is not None:
        bounds += [(getattr(found.hit_rates, name), 0, 1) for name in found.hit_rates.layers]
    for (value, low, high), least, most in bounds:
        known = np.isfinite(low)
        assert_array_equal(known, np.isfinite(high))
        assert (known <= np.isfinite(value)).all()
        assert ((low <= value) & (value <= high))[known].all()
        assert ((low >= least - 1e-6) & (high <= most + 1e-6))[known].all()


def test_an_interval_needs_two_groups_that_have_something_to_count() -> None:
    bootstrap = Bootstrap(4, 200, 0)
    value, low, high = bootstrap.ratio(np.array([1, 0, 2, 1]), np.array([4, 0, 4, 2]))
    assert value == 0.4
    assert low < 0.4 < high
    value, low, high = bootstrap.ratio(np.zeros((4, 2)), np.zeros((4, 2)))
    assert np.isnan([value, low, high]).all()
    value, low, high = bootstrap.ratio(np.array([0, 2, 0, 0]), np.array([0, 4, 0, 0]))
    assert value == 0.5
    assert np.isnan([low, high]).all()


def test_resamples_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    asked: Array = rng.integers(1, 9, (50, 3))
    hits: Array = rng.binomial(asked, 0.3)
    whole = Bootstrap(50, 100, 1).ratio(hits, asked)
    monkeypatch.setattr("perfmodel.routing.statistics.intervals._CHUNK_BYTES", 8 * 6 * 7)
    assert_allclose(Bootstrap(50, 100, 1).ratio(hits, asked), whole, rtol=1e-12, atol=0)


def test_without_resamples_there_are_values_but_no_intervals() -> None:
    whole = survey(recording())
    for resamples in (0, 1):
        found = survey(recording(), resamples=resamples)
        assert found.hit_rates is not None
        assert whole.hit_rates is not None
        for name, layers in found.hit_rates.layers.items():
            overall = getattr(found.hit_rates, name)
            assert np.isnan([overall.low, overall.high]).all()
            assert np.isnan([layers.low, layers.high]).all()
            assert_array_equal(overall.value, getattr(whole.hit_rates, name).value)
        for layered in (found.skew["all"].gini, found.reuse["decode"].chance):
            assert np.isnan([layered.overall.low, layered.overall.high]).all()


@pytest.mark.parametrize("sequences", [6, 12, 33])
def test_intervals_beside_other_sequences_hold_the_truth(sequences: int) -> None:
    rng = np.random.default_rng(0)
    inside = narrow = 0
    for seed in range(300):
        as_row, as_column = rng.normal(0, 0.03, sequences), rng.normal(0, 0.05, sequences)
        pairs = 0.5 + as_row[:, None] + as_column + rng.normal(0, 0.05, (sequences, sequences))
        np.fill_diagonal(pairs, 0.0)
        rows, columns, ones = pairs.sum(1) / (sequences - 1), pairs.sum(0) / (sequences - 1), np.ones(sequences)
        bootstrap = Bootstrap(sequences, 200, seed)
        value, low, high = bootstrap.paired_ratio(rows, ones, columns, ones)
        assert_allclose(value, rows.mean(), rtol=1e-12, atol=0)
        inside += low <= 0.5 <= high
        _, low, high = bootstrap.ratio(rows, ones)
        narrow += low <= 0.5 <= high
    assert 0.9 <= inside / 300 <= 0.99
    assert narrow / 300 < 0.85


def test_another_sequence_counts_as_the_one_that_places_too() -> None:
    trace = recording().map_layers([3, 17])
    count, half = trace.num_sequences, 4
    decode = selection_counts(trace, "decode").astype(float)
    prefill = selection_counts(trace, "prefill").astype(float)
    share, by_layer = decode / decode.sum((1, 2), keepdims=True), decode / decode.sum(2, keepdims=True)
    placed = top_experts(prefill, half)
    scaled = [one / np.sqrt((one**2).sum(-1, keepdims=True)) for one in (prefill, decode)]
    pairs = {
        "hits": np.einsum("sle,ole->so", share, placed),
        "layer": np.einsum("se,oe->so", by_layer[:, 1], placed[:, 1]),
        "cosine": np.einsum("sle,ole->so", scaled[1], scaled[0]) / 2,
    }
    found = survey(trace, resamples=30, seed=5)
    assert found.hit_rates is not None
    assert found.similarity is not None
    rates = found.hit_rates
    estimates = {
        "hits": tuple(part[half - 1] for part in rates.other_sequence),
        "layer": tuple(part[1] for part in rates.layers["other_sequence"]),
        "cosine": found.similarity.other_sequence.overall,
    }
    rng = np.random.default_rng(5)
    drawn = [rng.integers(0, count, count) for _ in range(30)]
    for name, matrix in pairs.items():
        np.fill_diagonal(matrix, 0.0)
        moved = (matrix.sum(0) + matrix.sum(1)) / (count - 1)
        error = np.std([moved[one].mean() for one in drawn], ddof=1) * math.sqrt(count / (count - 1))
        value, reach = matrix.sum() / (count * (count - 1)), stats.t.ppf(0.975, count - 1) * error
        assert_allclose(estimates[name], [value, value - reach, min(value + reach, 1)], rtol=1e-6, atol=0, err_msg=name)


@given(traces(phases="both"), st.integers(0, 9))
def test_static_profiles_are_chosen_anew_in_resamples(trace: RoutingTrace, seed: int) -> None:
    kept = selection_counts(trace, "decode").astype(np.int64)
    kept = np.ascontiguousarray(kept[kept.any((1, 2))])
    count, layers, experts = kept.shape
    if count < 2 or experts < 2:
        return
    rng = np.random.default_rng(seed)
    times = np.stack([np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(3)])
    hits, layer_hits = np.zeros((3, 2, experts - 1)), np.zeros((3, 2, layers))
    shares = np.stack([np.floor(one * (2**36 / one.sum()) + 0.5) for one in kept]).astype(np.int64)
    picks = kept.sum(-1, keepdims=True)
    by_layer = np.floor(kept * (2**36 / np.maximum(picks, 1)) + 0.5).astype(np.int64)
    told, ones = (picks[..., 0] > 0).astype(np.int64), np.ones(count, np.int64)
    tables_of = np.stack([shares, kept, by_layer])
    compare.static_resampled(tables_of, np.arange(experts), ones, told, times, hits, layer_hits)
    for r, kind in itertools.product(range(3), range(2)):
        drawn = np.repeat(np.arange(count), times[r])
        if len(set(drawn.tolist())) < 2:
            continue
        whole, of_layer = np.zeros(experts - 1), [[] for _ in range(layers)]  # type: ignore[var-annotated]
        for s in drawn:
            others = sum((kept if kind else shares)[o] for o in drawn if o != s)
            for layer, k in itertools.product(range(layers), range(1, experts)):
                found = sum(kept[s, layer, e] for e in plain.top(others[layer], k))
                whole[k - 1] += found / kept[s].sum() / count
                if k == experts // 2 and kept[s, layer].any():
                    of_layer[layer].append(found / kept[s, layer].sum())
        assert_allclose(np.cumsum(hits[r, kind]), whole, rtol=1e-9, atol=1e-9)
        means = [np.mean(one) if one else np.nan for one in of_layer]
        assert_allclose(layer_hits[r, kind], means, rtol=1e-9, atol=1e-9)


def test_static_intervals_are_those_of_profiles_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    anew = survey(recording()).hit_rates
    monkeypatch.setattr(tables, "UNIT_BYTES", 5 * 3 * 8 * 32 * 8)
    found = survey(recording())
    fixed = found.hit_rates
    assert anew is not None
    assert fixed is not None
    assert any("hold the profile fixed" in note for note in found.notes)
    for name in ("static", "static_pooled"):
        one, two = getattr(anew, name), getattr(fixed, name)
        assert_array_equal(one.value, two.value)
        assert (one.high - one.low).mean() > (two.high - two.low).mean()


def test_static_profiles_of_many_sequences_are_chosen_anew_in_units(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ids = (rng.random((60 * 30, 2, 8)) + np.repeat(rng.random((60, 2, 8)), 30, axis=0)).argsort(-1)[..., :2]
    trace = make_trace(ids, [30] * 60, [10] * 60, 8)
    alone = survey(trace).hit_rates
    monkeypatch.setattr(tables, "MAX_UNITS", 20)
    units = survey(trace).hit_rates
    assert alone is not None
    assert units is not None
    for name in ("static", "static_pooled"):
        one, two = getattr(alone, name), getattr(units, name)
        assert_array_equal(one.value, two.value)
        assert 0.6 < (two.high - two.low).mean() / (one.high - one.low).mean() < 1.6


def test_layers_without_another_prefill_are_left_out_of_the_mean() -> None:
    trace = recording().map_layers([3, 17])
    ids = trace.topk_ids.astype(int)
    ids[:, 0] = -1
    found = survey(make_trace(ids, trace.sequence_lengths.tolist(), trace.prompt_len.tolist(), 8)).similarity
    alone = survey(trace.map_layers([1])).similarity
    assert found is not None
    assert alone is not None
    assert np.isnan(found.other_sequence.layers.value[0])
    for part, wanted in zip(found.other_sequence.overall, alone.other_sequence.overall, strict=True):
        assert_allclose(part, wanted, rtol=1e-9, atol=0)


def test_two_sequences_tell_nothing_about_others() -> None:
    found = survey(recording().sequences([0, 1]))
    assert found.hit_rates is not None
    assert found.similarity is not None
    rates = found.hit_rates
    for name in ("other_sequence", "static", "static_pooled"):
        for value, low, high in (getattr(rates, name), rates.layers[name]):
            assert np.isfinite(value).all()
            assert np.isnan([low, high]).all()
    for value, low, high in found.similarity.other_sequence:
        assert np.isfinite(value).all()
        assert np.isnan([low, high]).all()
    assert (rates.own.low < rates.own.high).all()


def test_a_scope_of_one_sequence_has_no_intervals() -> None:
    trace = recording()
    lengths, prompts = trace.sequence_lengths.tolist(), [0] * trace.num_sequences
    prompts[2] = 50
    found = survey(make_trace(trace.topk_ids.astype(int), lengths, prompts, 8))
    skew, reuse = found.skew["prefill"], found.reuse["prefill"]
    assert found.drift is not None
    assert found.similarity is not None
    estimates = [*skew.top_half, *skew.gini, *skew.entropy, *reuse.measured, *reuse.chance, *found.distinct["prefill"]]
    estimates += [found.drift.cosine, found.drift.hit_rate, *found.similarity.cosine, found.similarity.overlap]
    for value, low, high in estimates:
        assert np.isfinite(value).any()
        assert np.isnan([low, high]).all()


@pytest.mark.parametrize("sequences", [6, 12, 33])
def test_an_interval_of_a_share_holds_the_truth_as_often_as_it_says(sequences: int) -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        picks: Array = rng.integers(20, 60, sequences)
        hits: Array = rng.binomial(picks, rng.beta(6, 14, sequences))
        _, low, high = Bootstrap(sequences, 200, 0).ratio(hits, picks)
        inside += low <= 0.3 <= high
    assert 0.92 <= inside / 400 <= 0.98


@pytest.mark.parametrize("spread", [1000.0, 15.0])
@pytest.mark.parametrize("sequences", [6, 12, 33])
def test_intervals_of_skew_hold_the_truth_although_few_sequences_look_skewed(sequences: int, spread: float) -> None:
    rng = np.random.default_rng(1)
    profile = rng.dirichlet([spread] * 8, size=16)
    bent = (Bent(0.0, 7 / 8, 2),)
    truth = gini(profile).mean()

    def measure(sums: Array) -> tuple[Array, ...]:
        return gini(sums).mean(-1), gini(sums)

    inside = below = 0
    for _ in range(100):
        shares = np.stack([rng.dirichlet(30 * one, sequences) for one in profile], axis=1)
        bootstrap = Bootstrap(sequences, 100, 0)
        ((value, low, high), _), *_ = bootstrap.layered_skew(measure, bent, rng.multinomial(300, shares))
        inside += low <= truth <= high
        below += value > truth
    assert inside >= 88
    assert below >= 95  # what the interval has to make up for


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
    one, again, other = (survey(recording(), batches=[3], seed=seed).as_dict() for seed in (1, 1, 2))
    assert one == again
    assert one["batches"]["distinct"] != other["batches"]["distinct"]
    for kind in ("value", "low"):
        same = one["reuse"]["all"]["chance"]["overall"][kind] == other["reuse"]["all"]["chance"]["overall"][kind]
        assert same == (kind == "value")


def test_progress_is_told_in_rows_of_all_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recording()
    trace.save(tmp_path / "t.npz")
    monkeypatch.setattr(blocks, "BLOCK_PICKS", 64 * 50)
    for source, passes in ((trace, 2), (tmp_path / "t.npz", 3)):
        told: list[tuple[int, int]] = []

        def tell(done: int, total: int, told: list[tuple[int, int]] = told) -> None:
            told.append((done, total))

        survey(source, report=tell)
        assert told == sorted(set(told))
        assert {total for _, total in told} == {passes * trace.num_tokens}
        assert told[-1][0] == passes * trace.num_tokens
        assert len(told) >= passes * 2
    seen: list[tuple[int, int]] = []
    blocks.open_trace(tmp_path / "t.npz", report=lambda *rows: seen.append(rows))
    assert seen[-1] == (trace.num_tokens, trace.num_tokens)
    # Where one look is enough, all is done after it.
    seen.clear()
    once = trace.sequences([0]).map_layers([0])
    survey(make_trace(once.topk_ids[:4], [4], [4], 8), report=lambda *rows: seen.append(rows))
    assert seen == [(4, 8), (8, 8)]


def test_many_sequences_are_resampled_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = survey(recording())
    monkeypatch.setattr(tables, "MAX_GROUPS", 3)
    found = survey(recording())
    assert (alone.groups, found.groups) == (6, 3)
    assert any("3 random groups" in note for note in found.notes)
    for name in ("own", "other_sequence", "static", "oracle"):
        one, two = getattr(alone.hit_rates, name), getattr(found.hit_rates, name)
        assert_allclose(one.value, two.value, rtol=1e-12, atol=0)
        assert (two.low <= two.value).all()
        assert (two.value <= two.high).all()
    assert_array_equal(alone.skew["all"].picks, found.skew["all"].picks)


def test_very_many_experts_are_placed_at_fewer_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    every = survey(recording()).hit_rates
    monkeypatch.setattr(tables, "TABLE_BYTES", 8 * 32 * 8 * 3)
    few = survey(recording()).hit_rates
    assert every is not None
    assert few is not None
    assert few.gpu_experts.tolist() == [1, 4, 7]
    for name in ("own", "other_sequence", "static", "static_pooled", "oracle"):
        assert_allclose(getattr(few, name).value, getattr(every, name).value[[0, 3, 6]], rtol=1e-12, atol=0)
        assert_allclose(few.layers[name].value, every.layers[name].value, rtol=1e-12, atol=0)


def test_large_tables_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAIR_BYTES", 100)
    found = survey(recording())
    assert found.next_layer is None
    assert any("too large" in note for note in found.notes)
    monkeypatch.setattr(tables, "BATCH_PICKS", 64 * 64 * 5)
    shorter = survey(recording())
    assert shorter.batches is not None
    assert shorter.batches.steps == 5
    monkeypatch.setattr(tables, "MAX_CELLS", 255)
    with pytest.raises(TraceError, match="32 layers of 8 experts are too many for a survey, at most 255"):
        survey(recording())


def test_drift_stops_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "DRIFT_WINDOWS", 2)
    found = survey(recording())
    assert found.drift is not None
    assert len(found.drift.cosine.value) == 2
    assert any("first 6 rows" in note for note in found.notes)


@given(traces(), st.integers(1, 9))
def test_blocks_change_nothing_but_where_caches_start_again(trace: RoutingTrace, block_rows: int) -> None:
    cut, whole = look(trace, block_rows).as_dict(), look(trace, 1000).as_dict()
    json.dumps(cut, allow_nan=False)
    for one in (cut, whole):
        del one["cache"]
        one["notes"] = [note for note in one["notes"] if "start empty again" not in note]
    assert cut == whole


def test_a_streamed_file_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recording()
    trace.save(tmp_path / "t.npz")
    monkeypatch.setattr(blocks, "BLOCK_PICKS", 64 * 50)
    assert blocks.open_trace(tmp_path / "t.npz").block_rows == 50
    streamed, whole = survey(tmp_path / "t.npz"), survey(trace)
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
        ("resamples", -1, "resamples is -1, expected an integer in 0..10000"),
        ("min_decode", 0, "min_decode is 0"),
        ("seed", -1, "seed is -1"),
        ("seed", 1.5, "seed is 1.5"),
    ],
)
def test_numbers_that_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        survey(recording(), **{option: value})


def test_longest_lag_and_windows_longer_than_anything() -> None:
    trace = recording().map_layers([0])
    found = survey(trace, lags=[64, 63], windows=[10**9])
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
    found = survey(trace, lags=range(1, 65)).reuse["all"].measured.overall.value
    assert_allclose(found, [plain.reuse(trace, "all", lag, [0]) for lag in range(1, 65)], rtol=1e-12, atol=0)
    only = np.where(ids == 0, 0, -1).reshape(-1, 1, 1)
    trace = make_trace(only, [260], [0], 4)
    found = survey(trace, lags=range(1, 65)).reuse["all"].measured.overall.value
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
