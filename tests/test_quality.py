"""Expected quantisation loss: against plain loops, by hand, and beside speed wherever it is shown."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal
from commands import run as command
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import (
    NDP_SYSTEM,
    mixtral,
    models,
    plain_model,
    policy_texts,
    recording,
    small_trace,
    traces,
    without_chance,
)

import perfmodel
from perfmodel import plots
from perfmodel.bitwidth import BUNDLED_LOSSES, LossTable, losses_for
from perfmodel.errors import TraceError
from perfmodel.evaluation import METRICS, QUALITY
from perfmodel.evidence import context
from perfmodel.evidence.bench import Bench
from perfmodel.kernels.quality import count_picks, weigh, weigh_sequences
from perfmodel.model import MoEModel
from perfmodel.oracle import largest_difference, per_pick
from perfmodel.point import hardware_point
from perfmodel.policies import Executor, WorkClass
from perfmodel.routing import RoutingTrace
from perfmodel.run import Run, evaluate, plan_run
from perfmodel.scenario import Scenario
from perfmodel.sweeps import identity

GPU, FETCH, NDP, SKIP = Executor.GPU, Executor.FETCH, Executor.NDP, Executor.SKIP
SMALL = ("--prompt", "8", "--output", "4")


def bundled(**changes: Any) -> LossTable:
    return dataclasses.replace(LossTable.load(BUNDLED_LOSSES), **changes)


def planned(policy: str, losses: LossTable | None = None, **options: Any) -> Run:
    """A policy on the bundled recording and Mixtral-8x7B."""
    return plan_run(mixtral(), "h100-cxl2-ndp", recording(), policy, losses=losses, **{"output": 24, **options})


@st.composite
def tables(draw: st.DrawFn, model: MoEModel, monotone: bool = False, whole: bool = False) -> LossTable:
    """Loss tables of a model: some widths missing, some without variances, unless ``whole``."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = (1, 2, 3, 4) if whole else draw(st.sampled_from([(1, 2, 3, 4), (2, 3, 4), (1, 2, 4), (1, 2, 3, 4, 8)]))
    shape = (len(model.moe_layers), model.num_experts)
    losses = rng.random((*shape, len(bits))) * draw(st.sampled_from([1e-4, 1.0, 1e3]))
    if monotone:
        losses = -np.sort(-losses, axis=-1)
    variance = rng.random(shape) + 0.01 if whole or draw(st.booleans()) else None
    return LossTable(losses, name="drawn", bits=bits, output_variance=variance)


def searches(policy: str) -> bool:
    """Whether a policy looks for bits in the loss table, and so needs all of it."""
    return "selector=prefix" in policy or "selector=optimum" in policy


# --- kernels ---


@st.composite
def picked(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Classes, experts and offsets of ragged sequences, some of them empty; E and above is no expert."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    experts, classes = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (int(offsets[-1]), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    picks = rng.integers(0, classes, shape).astype(np.uint8)
    return picks, rng.integers(0, experts + 2, shape).astype(np.uint16), offsets, experts, classes


@given(picked(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_kernels_count_and_add_up_every_pick(drawn, num_tables: int, seed: int) -> None:
    picks, ids, offsets, experts, classes = drawn
    layers = picks.shape[1]
    values = np.random.default_rng(seed).random((num_tables, layers, experts, classes))
    expected: Counter[tuple[int, int, int]] = Counter()
    sums = np.zeros((len(offsets) - 1, num_tables))
    by_class = np.zeros((len(offsets) - 1, classes), np.int64)
    for s in range(len(offsets) - 1):
        for t in range(offsets[s], offsets[s + 1]):
            for (layer, j), expert in np.ndenumerate(ids[t]):
                if expert < experts:
                    c = int(picks[t, layer, j])
                    expected[layer, int(expert), c] += 1
                    sums[s] += values[:, layer, int(expert), c]
                    by_class[s, c] += 1
    counts = count_picks(picks, ids, experts, classes)
    assert counts.shape == (layers, experts, classes)
    assert {place: count for place, count in np.ndenumerate(counts) if count} == dict(expected)
    assert_allclose(weigh(counts, values), sums.sum(axis=0), rtol=1e-12, atol=0)
    found, classes_found = weigh_sequences(picks, ids, offsets, values)
    assert_allclose(found, sums, rtol=1e-12, atol=0)
    assert_array_equal(classes_found, by_class)


def test_values_where_nothing_is_picked_do_not_matter() -> None:
    picks, ids = np.zeros((1, 1, 1), np.uint8), np.zeros((1, 1, 1), np.uint16)
    values = np.array([[[[2.0, np.nan]], [[np.nan, np.nan]]]]).reshape(1, 1, 2, 2)
    assert weigh(count_picks(picks, ids, 2, 2), values).tolist() == [2.0]
    assert weigh_sequences(picks, ids, np.array([0, 1, 1]), values)[0].tolist() == [[2.0], [0.0]]
    picks[:] = 1
    assert np.isnan(weigh(count_picks(picks, ids, 2, 2), values)).all()


# --- by hand ---

#: One layer of two experts: losses at 2 and 4 bits, and variances.
TINY = LossTable(
    np.array([[[0.5, 0.125], [0.25, 0.0625]]]), name="tiny", bits=(2, 4), output_variance=np.array([[2.0, 1.0]])
)


def tiny(
    classes: list[WorkClass],
    picks: list[list[int]],
    ids: list[list[int]],
    *,
    starts: tuple[int, ...] = (0,),
    **changes: Any,
) -> Run:
    """A run of one layer whose picks are given, step by step; expert 2 does not exist.

    starts : first step of every sequence.
    """
    model = plain_model(num_layers=1, num_experts=2, expert_bits=changes.pop("expert_bits", 16.0))
    routed = np.array(ids)[:, None, :]
    trace = RoutingTrace(
        topk_ids=np.where(routed == 2, -1, routed),
        topk_weights=None,
        sequence_offsets=np.array([*starts, len(ids)]),
        prompt_len=np.zeros(len(starts), np.int64),
        layer_index=np.array([0]),
        num_experts=2,
        metadata={"model": "plain", "source": "synthetic"},
    )
    run = plan_run(model, NDP_SYSTEM, trace, "monde", losses=changes.pop("losses", TINY))
    plan = dataclasses.replace(run.plan, classes=tuple(classes), picks=np.array(picks, np.uint8)[:, None, :], **changes)
    return dataclasses.replace(run, plan=plan)


def test_a_mean_over_all_assigned_picks() -> None:
    classes = [WorkClass(GPU, 16.0), WorkClass(NDP, 2.0, quantised=True), WorkClass(FETCH, 4.0)]
    # Full precision, expert 1 at 2 bits; expert 0 at 4 bits, nothing; expert 0 at 2 bits, expert 1 at 4 bits.
    found = tiny(classes, [[0, 1], [2, 2], [1, 2]], [[0, 1], [0, 2], [0, 1]]).quality
    assert found.loss == (0.25 + 0.125 + 0.5 + 0.0625) / 5
    assert found.mean_bits == 3.0  # of the four quantised picks
    # Half way between 2 and 4 bits: 0.3125 for expert 0, 0.15625 for expert 1.
    assert found.vs_uniform == (0.25 + 0.125 + 0.5 + 0.0625) / (2 * 0.3125 + 2 * 0.15625)
    assert found.noise == (0.25 + 0.125 + 0.5 + 0.0625) / (3 * 2.0 + 2 * 1.0)
    assert (found.quantised, found.skipped) == (0.8, 0.0)


def test_uniform_bits_are_those_of_all_quantised_experts_where_the_plan_knows_them() -> None:
    classes = [WorkClass(NDP, 2.0, quantised=True), WorkClass(NDP, 4.0, quantised=True)]
    found = tiny(classes, [[1, 0]], [[0, 1]], mean_bits=2.5).quality
    assert found.mean_bits == 2.5
    assert found.vs_uniform == (0.125 + 0.25) / (0.75 * 0.5 + 0.25 * 0.125 + 0.75 * 0.25 + 0.25 * 0.0625)


def test_a_skipped_pick_counts_the_whole_output() -> None:
    classes = [WorkClass(SKIP, 16.0), WorkClass(FETCH, 4.0), WorkClass(GPU, 16.0)]
    found = tiny(classes, [[0, 1], [2, 0]], [[0, 1], [0, 2]]).quality
    assert found.loss == (2.0 + 0.0625) / 3  # the last pick is skipped because there is none
    assert found.vs_uniform == 1.0
    assert found.noise == (2.0 + 0.0625) / 5.0
    assert found.skipped == 1 / 3
    alone = tiny(classes, [[0, 2]], [[1, 0]]).quality
    assert alone.loss == 0.5
    assert math.isnan(alone.vs_uniform)
    assert math.isnan(alone.mean_bits)


@pytest.mark.parametrize(("expert_bits", "loss"), [(16.0, 0.125), (4.25, 0.125), (4.0, 0.0), (3.0, 0.0)])
def test_the_stored_precision_is_no_quantisation(expert_bits: float, loss: float) -> None:
    classes = [WorkClass(NDP, 4.0)]
    found = tiny(classes, [[0, 0]], [[0, 2]], expert_bits=expert_bits).quality
    assert found.loss == loss
    assert math.isnan(found.vs_uniform) is (loss == 0)
    assert found.noise == loss / 2.0


def test_what_a_table_does_not_hold_is_unknown_and_said() -> None:
    two, three, half = (WorkClass(NDP, bits, quantised=True) for bits in (2.0, 3.0, 2.5))
    for work in (three, half):
        found = tiny([two, work], [[0, 1]], [[0, 1]])
        assert math.isnan(found.quality.loss)
        assert math.isnan(found.quality.vs_uniform)
        assert math.isnan(found.quality.noise)
        assert f"quality: loss table tiny has no losses at {work.bits:g} bits, so the loss is unknown" in (
            found.quality.notes
        )
        priced = found.price()
        assert (priced.quant_loss, priced.quant_loss_vs_uniform, priced.quant_noise) == (None, None, None)
    # Without a pick of it, the width does not matter.
    assert tiny([two, three], [[0, 0]], [[0, 1]]).quality.loss == 0.375
    only = dataclasses.replace(TINY, output_variance=None)
    found = tiny([two, WorkClass(SKIP, 16.0)], [[0, 0]], [[0, 1]], losses=only).quality
    assert found.loss == 0.375
    assert found.vs_uniform == 1.0
    assert math.isnan(found.noise)
    assert any("tiny has no output variances, so the share" in note for note in found.notes)
    found = tiny([two, WorkClass(SKIP, 16.0)], [[0, 1]], [[0, 1]], losses=only).quality
    assert math.isnan(found.loss)
    assert any("tiny has no output variances, so the loss of skipped picks" in note for note in found.notes)
    # Uniform bits that the table does not reach: the loss itself is known.
    wide = dataclasses.replace(TINY, bits=(4, 8))
    found = tiny([WorkClass(NDP, 4.0)], [[0, 0]], [[0, 1]], losses=wide, mean_bits=3.0).quality
    assert found.loss == 0.375
    assert math.isnan(found.vs_uniform)
    assert any("no losses at 3 bits, so the loss at uniform bits is unknown" in note for note in found.notes)


def test_over_nothing_is_not_a_number() -> None:
    nothing = LossTable(np.zeros((1, 2, 2)), name="exact", bits=(2, 4), output_variance=np.zeros((1, 2)))
    for table, loss in ((nothing, 0.0), (dataclasses.replace(nothing, losses=TINY.losses), 0.375)):
        found = tiny([WorkClass(NDP, 2.0)], [[0, 0]], [[0, 1]], losses=table).quality
        assert found.loss == loss
        assert math.isnan(found.vs_uniform) is (loss == 0)
        assert math.isnan(found.noise)


def test_every_sequence_on_its_own() -> None:
    classes = [WorkClass(GPU, 16.0), WorkClass(NDP, 2.0, quantised=True), WorkClass(NDP, 4.0, quantised=True)]
    picks, ids = [[1, 2], [0, 0], [1, 0], [2, 2]], [[0, 1], [0, 1], [1, 0], [2, 2]]
    # The second sequence quantises nothing, and the last one has no pick at all.
    each = tiny(classes, picks, ids, starts=(0, 1, 2, 3), mean_bits=2.0).sequence_quality
    assert each.picks.tolist() == [2, 2, 2, 0]
    assert each.loss.tolist() == [(0.5 + 0.0625) / 2, 0.0, 0.25 / 2, 0.0]
    assert_array_equal(each.vs_uniform, [(0.5 + 0.0625) / (0.5 + 0.25), math.nan, 1.0, math.nan])
    assert each.noise.tolist() == [(0.5 + 0.0625) / 3.0, 0.0, 0.25 / 3.0, 0.0]
    # Where nothing is lost, no variance is needed to say so.
    without = dataclasses.replace(TINY, output_variance=None)
    each = tiny(classes, picks, ids, starts=(0, 1, 2, 3), losses=without).sequence_quality
    assert_array_equal(each.noise, [math.nan, 0.0, math.nan, 0.0])


# --- against the plain loop over picks ---


@given(st.data())
def test_any_plan_and_table_equals_the_plain_loop(data) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True, max_decode=4))
    text = data.draw(policy_texts(model))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    table = data.draw(tables(model, whole=searches(text)))
    run = plan_run(model, NDP_SYSTEM, trace, text, losses=table)
    expected = {name: value for name, value in per_pick(run).items() if name in QUALITY}
    assert len(expected) == 3
    assert largest_difference(run.price(), expected) < 1e-12


def test_the_check_notices_another_loss() -> None:
    run = planned("hobbit", output=3)
    priced, checked = run.price(), per_pick(run)
    assert largest_difference(priced, checked) < 1e-12
    for name in QUALITY:
        assert largest_difference(dataclasses.replace(priced, **{name: getattr(priced, name) * 1.001}), checked) > 5e-4
        assert largest_difference(dataclasses.replace(priced, **{name: None}), checked) == math.inf


# --- what it does when plans change ---


@pytest.mark.parametrize(
    "policy",
    ["monde", "monde:reading=all-ndp", "context-aware:selector=full", "static:selector=full", "static:gpu_experts=8",
     "hobbit:split=gates,t1=1,t2=1", "hobbit:low_bits=16,split=gates,t1=0.5,t2=1"],
)  # fmt: skip
def test_without_quantisation_the_loss_is_exactly_zero(policy: str) -> None:
    system = NDP_SYSTEM.with_values({"gpu.memory_capacity_gb": 160})
    run = plan_run(mixtral(), system, recording(), policy, output=8)
    priced = run.price()
    assert (priced.quant_loss, priced.quant_loss_vs_uniform, priced.quant_noise) == (0.0, None, 0.0)
    assert not any("quality" in note for note in priced.notes)
    assert run.metrics(QUALITY, hardware_point(run.system)[None])["quant_loss"].tolist() == [0.0]
    assert run.sequence_quality.loss.tolist() == [0.0] * 6
    assert np.isnan(run.sequence_quality.vs_uniform).all()
    assert run.sequence_quality.picks.tolist() == [8 * 32 * 2] * 6


@settings(max_examples=40)
@given(st.data())
def test_more_uniform_bits_never_lose_more(data) -> None:
    model = data.draw(models(expert_bits=(16.0,)))
    trace = data.draw(traces(model, prefill=True))
    table = data.draw(tables(model, monotone=True, whole=True))
    count = data.draw(st.integers(0, model.num_experts))
    runs = [
        plan_run(
            model, NDP_SYSTEM, trace, f"context-aware:selector=uniform,mean_bits={b},gpu_experts={count}", losses=table
        )
        for b in (1, 2, 3, 4)
    ]
    for fewer, more in itertools.pairwise(runs):
        assert more.quality.loss <= fewer.quality.loss
        assert (more.sequence_quality.loss <= fewer.sequence_quality.loss).all()
        assert more.quality.quantised == fewer.quality.quantised
    for run in runs:
        assert run.quality.vs_uniform == 1.0 or math.isnan(run.quality.vs_uniform)
        assert math.isnan(run.quality.vs_uniform) is (run.quality.quantised == 0)


@pytest.mark.parametrize("bits", [1, 4])
def test_all_at_one_width_is_uniform(bits: int) -> None:
    assert planned(f"context-aware:mean_bits={bits}").quality.vs_uniform == 1.0


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["context-aware", "monde", "hobbit"]))
def test_the_order_of_sequences_changes_nothing(data, name: str) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    # Drawn predictions depend on the whole trace.
    text = without_chance(data.draw(policy_texts(model, [name])))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    table = data.draw(tables(model, whole=searches(text)))
    order = data.draw(st.permutations(range(trace.num_sequences)))
    one = plan_run(model, NDP_SYSTEM, trace, text, losses=table)
    other = plan_run(model, NDP_SYSTEM, trace.sequences(order), text, losses=table)
    for field in ("loss", "vs_uniform", "noise"):
        assert_allclose(getattr(other.quality, field), getattr(one.quality, field), rtol=1e-13, atol=0)
        mine, theirs = (getattr(run.sequence_quality, field) for run in (one, other))
        assert_allclose(theirs, mine[list(order)], rtol=1e-13, atol=0)


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["context-aware", "hobbit"]))
def test_sequences_add_up_to_the_whole(data, name: str) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    # Drawn predictions depend on the whole trace.
    text = without_chance(data.draw(policy_texts(model, [name])))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    run = plan_run(model, NDP_SYSTEM, trace, text, losses=data.draw(tables(model, whole=True)))
    each = run.sequence_quality
    assert each.picks.sum() == run.replay.assigned.sum()
    assert_allclose(np.average(each.loss, weights=each.picks), run.quality.loss, rtol=1e-12, atol=0)
    for s in range(trace.num_sequences):
        own = plan_run(model, NDP_SYSTEM, trace.sequences([s]), text, losses=run.losses)
        alone = own.quality
        assert_allclose(each.loss[s], alone.loss, rtol=1e-12, atol=0)
        assert_allclose(each.noise[s], alone.noise, rtol=1e-12, atol=0)
        if alone.mean_bits == run.quality.mean_bits or math.isnan(alone.mean_bits):
            assert_allclose(each.vs_uniform[s], alone.vs_uniform, rtol=1e-12, atol=0)


def test_the_search_by_hand() -> None:
    """Bits of the near-data experts at a mean of 2, and the loss of their picks, from the trace alone."""
    run, table = planned("context-aware:mean_bits=2,gpu_experts=4"), LossTable.load(BUNDLED_LOSSES)
    trace = run.replay.trace
    lost = uniform = variance = picks = 0.0
    for s in range(trace.num_sequences):
        prompt, steps = trace.topk_ids[trace.prefill_slice(s)], trace.topk_ids[trace.decode_slice(s)]
        weights = trace.topk_weights[trace.prefill_slice(s)].astype(float)
        for layer in range(trace.num_layers):
            counts = np.bincount(prompt[:, layer].ravel(), minlength=8)
            shares = np.bincount(prompt[:, layer].ravel(), weights[:, layer].ravel(), minlength=8)
            order = np.argsort(-(counts / counts.sum() + shares / shares.sum()), kind="stable")
            bits = perfmodel.select_bitwidths([4, 3, 2, 1], table.losses[layer, order[4:]], 2.0)
            width = dict(zip(order[4:].tolist(), bits.tolist(), strict=True))
            for expert in steps[:, layer].ravel().tolist():
                lost += table.losses[layer, expert, width[expert] - 1] if expert in width else 0.0
                uniform += table.losses[layer, expert, 1] if expert in width else 0.0
                variance += table.output_variance[layer, expert]
                picks += 1
    assert_allclose(
        [run.quality.loss, run.quality.vs_uniform, run.quality.noise],
        [lost / picks, lost / uniform, lost / variance], rtol=1e-12, atol=0,
    )  # fmt: skip
    assert lost < uniform


def test_hobbit_loses_by_skips_and_by_few_bits() -> None:
    run, table = planned("hobbit"), LossTable.load(BUNDLED_LOSSES)
    ids, picks = run.replay.decode_ids, run.plan.picks
    work = [run.plan.classes[i] for i in range(len(run.plan.classes))]
    lost = {"skip": 0.0, "low": 0.0}
    for (t, layer, j), pick in np.ndenumerate(picks):
        expert = ids[t, layer, j]
        if work[pick].executor == SKIP:
            lost["skip"] += table.output_variance[layer, expert]
        elif work[pick].bits == 4:
            lost["low"] += table.losses[layer, expert, 3]
    assert_allclose(run.quality.loss, (lost["skip"] + lost["low"]) / picks.size, rtol=1e-12, atol=0)
    assert lost["skip"] > 5 * lost["low"] > 0  # leaving an expert out costs far more than 4 bits do
    assert abs(run.quality.skipped - 0.03) < 0.002
    assert abs(run.quality.quantised - 0.30) < 0.002
    assert planned("hobbit:low_bits=2").quality.loss > run.quality.loss
    without = planned("hobbit:low_bits=16").quality
    assert_allclose(without.loss, lost["skip"] / picks.size, rtol=1e-12, atol=0)
    assert math.isnan(without.vs_uniform)


# --- which table ---


def test_the_table_that_was_given_is_used() -> None:
    doubled = bundled(losses=2 * LossTable.load(BUNDLED_LOSSES).losses, name="doubled")
    one, two = planned("context-aware:mean_bits=2"), planned("context-aware:mean_bits=2", doubled)
    assert two.losses is doubled
    assert_allclose(two.quality.loss, 2 * one.quality.loss, rtol=1e-12, atol=0)
    assert any("doubled (measured)" in note and note.startswith("quality") for note in two.price().notes)
    assert any(f"{BUNDLED_LOSSES} (measured)" in note and note.startswith("quality") for note in one.price().notes)


def test_another_number_of_experts_is_assumed_by_default_and_refused_when_given() -> None:
    model = plain_model(num_layers=2, num_experts=4)
    trace = small_trace(model, [(4, 6), (3, 5)])
    run = plan_run(model, NDP_SYSTEM, trace, "context-aware:mean_bits=2,gpu_experts=0,selector=uniform")
    assert run.quality.loss == 4.0**-2
    assert math.isnan(run.quality.noise)
    priced = run.price()
    assert priced.quant_noise is None
    assert any("loss table assumed (assumed)" in note for note in priced.notes)
    assert any("has 8 experts per layer, the model 4, so it is not used" in note for note in priced.notes)
    for policy in ("hobbit", "context-aware:selector=uniform"):
        with pytest.raises(TraceError, match="has 8 experts per layer, the model 4"):
            evaluate(model, NDP_SYSTEM, trace, policy, losses=bundled())
    # Without quantisation no table is looked at.
    assert evaluate(model, NDP_SYSTEM, trace, "monde", losses=bundled()).quant_loss == 0.0


def test_fewer_layers_in_the_table_are_cycled_with_a_note() -> None:
    source = LossTable.load(BUNDLED_LOSSES)
    assert source.output_variance is not None
    short = LossTable(source.losses[:3], name="short", output_variance=source.output_variance[:3])
    long = LossTable(
        source.losses[np.arange(32) % 3], name="long", output_variance=source.output_variance[np.arange(32) % 3]
    )
    one, two = (planned("hobbit", table) for table in (short, long))
    assert one.quality.loss == two.quality.loss
    assert one.quality.noise == two.quality.noise
    assert any("short of 3 layers is cycled to 32" in note for note in one.quality.notes)


# --- beside speed ---


def test_speed_alone_does_not_look_at_quality() -> None:
    run = planned("context-aware:mean_bits=2")
    timed = [name for name, one in METRICS.items() if one.family != "plan"] + ["hit_rate", "gpu_memory_bytes"]
    run.metrics(timed, hardware_point(run.system)[None])
    assert "quality" not in run.__dict__
    found = run.metrics(QUALITY, hardware_point(run.system)[None])
    assert "quality" in run.__dict__
    assert "sequence_quality" not in run.__dict__
    assert {name: values.tolist() for name, values in found.items()} == {
        "quant_loss": [run.quality.loss],
        "quant_loss_vs_uniform": [run.quality.vs_uniform],
        "quant_noise": [run.quality.noise],
    }


def test_a_sweep_is_what_compare_says_bit_for_bit() -> None:
    policies = ["monde", "hobbit", "static", "context-aware"]
    dataset = perfmodel.sweep(
        policy=policies, axes={"policy.mean_bits": [1, 2, 2.5, 3], "link.latency_us": [0.5, 1.0]}, metrics=QUALITY,
        output=6, progress=False,
    )  # fmt: skip
    assert dataset.attrs["losses"] == f"{BUNDLED_LOSSES} (measured)"
    for policy in policies:
        for bits in (1.0, 2.0, 2.5, 3.0):
            text = policy if policy in ("monde", "hobbit") else f"{policy}:mean_bits={bits:g}"
            options = ("--model", "mixtral-8x7b", "--output", 6, "--policy", text, "--json")
            (stated,) = command("compare", *options).document["evaluations"]
            for name in QUALITY:
                values = dataset[name].sel({"policy": policy, "policy.mean_bits": bits}).values.tolist()
                expected = math.nan if stated[name] is None else stated[name]
                assert_array_equal(values, [expected, expected])


def test_a_sweep_that_does_not_ask_does_not_speak_of_quality() -> None:
    arguments = {"policy": "hobbit", "axes": {"link.latency_us": [0.5, 1.0]}, "output": 4, "progress": False}
    asked = perfmodel.sweep(metrics=["tpot_mean_s", "quant_noise"], **arguments)
    other = perfmodel.sweep(metrics=["tpot_mean_s"], **arguments)
    assert "losses" not in other.attrs
    assert "quality" not in other.attrs["notes"]
    assert any(f"by loss table {BUNDLED_LOSSES} (measured)" in note for note in json.loads(asked.attrs["notes"]))
    assert "quality" in perfmodel.pareto(asked, minimise=["tpot_mean_s", "quant_noise"]).attrs["notes"]


def test_the_bundled_table_decides_a_sweep_of_any_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        found = perfmodel.sweep(
            policy="hobbit", axes={"link.latency_us": [0.5]}, metrics="quant_loss", output=2, progress=False
        )
        return str(found.attrs["key"])

    before = key()
    monkeypatch.setattr(identity, "_default_losses", lambda: "another")
    assert key() != before


def test_a_sweep_over_tables_names_them_all(tmp_path: Path) -> None:
    source = LossTable.load(BUNDLED_LOSSES)
    np.savez(tmp_path / "twice.npz", losses=2 * source.losses, output_variance=source.output_variance)
    axes = {"loss": [BUNDLED_LOSSES, str(tmp_path / "twice.npz")]}
    found = perfmodel.sweep(policy="hobbit", axes=axes, metrics="quant_loss", output=4, progress=False)
    assert found.attrs["losses"] == f"{BUNDLED_LOSSES} (measured), twice (origin not stated)"
    one, two = found["quant_loss"].values.ravel().tolist()
    assert one < two < 2 * one  # what is skipped loses the same


def test_answers_name_the_table_of_a_loss() -> None:
    scenario = Scenario.of(policy=["context-aware", "hobbit"], output=4)
    found = perfmodel.tornado(scenario, ["link.latency_us"], metric="quant_loss")
    assert np.array_equal(found["swing"].values, np.zeros((2, 1)))
    assert any(BUNDLED_LOSSES in note and "quality" in note for note in json.loads(found.attrs["notes"]))
    assert "quality" not in perfmodel.tornado(scenario, ["link.latency_us"]).attrs["notes"]
    answer = command("solve", "--for", "mean_bits", "--target", "quant_noise=0.05", "--output", 16, "--json").document
    (one,) = answer["answers"]
    bits = one["crossings"][0]["value"]
    below, above = (planned(f"context-aware:mean_bits={b!r}", output=16).quality.noise for b in (bits - 1e-6, bits))
    assert above <= 0.05 < below
    assert any("quality" in note for note in answer["notes"])


def test_the_front_of_latency_and_loss() -> None:
    dataset = perfmodel.sweep(
        policy=["context-aware", "monde"],
        axes={"policy.mean_bits": np.linspace(1, 4, 7), "policy.gpu_experts": [0, 4]},
        metrics=["tpot_mean_s", "quant_loss"], output=16, progress=False,
    )  # fmt: skip
    front = perfmodel.pareto(dataset, minimise=["tpot_mean_s", "quant_loss"])
    times, losses = front["tpot_mean_s"].values, front["quant_loss"].values
    assert (np.diff(times) > 0).all()
    assert (np.diff(losses) < 0).all()
    assert losses[-1] == 0.0  # MoNDE, the slowest, loses nothing
    assert len(times) > 5
    figure = plots.sweep_figure("pareto", dataset, policy="context-aware")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "quantisation loss of a decode pick (log)"
    assert axes.get_ylabel() == "mean time per output token (ms)"
    words = " ".join(figure.get_supxlabel().split())
    assert "Better: lower quantisation loss of a decode pick, lower mean time per output token." in words
    assert f"Losses: {BUNDLED_LOSSES} (measured)." in words


def test_compare_shows_quality_beside_speed() -> None:
    arguments = ("compare", "--model", "mixtral-8x7b", *SMALL)
    text, document = command(*arguments), command(*arguments, "--json").document
    table = losses_for(None, MoEModel.from_config("mixtral-8x7b"))
    assert document["losses"] == {
        "name": BUNDLED_LOSSES, "source": "measured", "model": "tiny-mixtral-32l", "hash": table.content_hash(),
    }  # fmt: skip
    lines = text.out.splitlines()
    for start, name, scale in (
        ("quantisation loss, mean of decode picks", "quant_loss", 1.0),
        ("  over that of uniform bits", "quant_loss_vs_uniform", 1.0),
        ("  noise: loss over the output's variance", "quant_noise", 100.0),
    ):
        cells = next(line.split() for line in lines if line.startswith(start))[-4:]
        stated = [one[name] for one in document["evaluations"]]
        assert [cell == "-" for cell in cells] == [value is None for value in stated]
        for cell, value in zip(cells, stated, strict=True):
            assert value is None or math.isclose(float(cell), scale * value, rel_tol=1e-3)
    assert [one["quant_loss"] == 0 for one in document["evaluations"]] == [True, False, False, False]
    assert any(line.startswith("- quality: ") and f"{BUNDLED_LOSSES} (measured)" in line for line in lines)
    checked = command(*arguments, "--check", "--json").document
    assert max(checked["check"]) < 1e-12


def test_compare_refuses_a_table_of_another_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "six.npz", losses=np.ones((32, 6, 4)))
    for policy in ("monde", "hobbit"):
        answer = command(
            "compare", "--model", "mixtral-8x7b", "--policy", policy, "--loss", tmp_path / "six.npz", *SMALL, "--json"
        )
        check_refusal(answer, "six has 6 experts per layer, the model 8")


# --- published accuracies ---


def test_published_accuracies_are_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(recording(), perfmodel.load_system("h100-cxl2-ndp"))
    monkeypatch.setattr(context, "OUTPUT", 16)
    found = context.quality_context(bench)
    assert {row.name: row.published_accuracy_percent for row in found.rows} == {
        "full precision": 70.03,
        "3 bits, selected": 69.90,
        "3 bits, uniform": 69.71,
        "2 bits, selected": 66.68,
        "2 bits, uniform": 63.48,
    }
    for row in found.rows:
        one = evaluate("mixtral-8x7b", "h100-cxl2-ndp", recording(), row.policy, prompt=128, output=16)
        stated = (row.quant_loss, row.quant_loss_vs_uniform, row.quant_noise)
        assert stated == (one.quant_loss, one.quant_loss_vs_uniform, one.quant_noise)
    assert found.mark == "secondary"
    assert "neither predicted" in found.sentence
    assert BUNDLED_LOSSES in found.sentence
    assert "2512.04476" in found.sentence
    published = context.load_accuracies()
    halved = published._replace(rows=tuple(row._replace(value=row.value / 2) for row in published.rows))
    monkeypatch.setattr(context, "load_accuracies", lambda: halved)
    again = context.quality_context(bench)
    assert [row[:5] for row in again.rows] == [row[:5] for row in found.rows]
    assert again.rows[0].published_accuracy_percent == 70.03 / 2


def test_compare_says_of_which_model_the_losses_are(tmp_path: Path) -> None:
    arguments = ("compare", "--model", "mixtral-8x7b", "--policy", "context-aware", *SMALL)
    note = f"- losses: {BUNDLED_LOSSES}, measured on tiny-mixtral-32l (hidden size 64), not on mixtral-8x7b"
    assert any(line.startswith(note) for line in command(*arguments).out.splitlines())
    path = tmp_path / "bare.npz"
    np.savez(path, losses=LossTable.load(BUNDLED_LOSSES).losses)
    document = command(*arguments, "--loss", path, "--json").document
    assert (document["losses"]["source"], document["losses"]["model"]) == ("unstated", None)
    assert "losses: bare (origin not stated)" in document["evaluations"][0]["notes"]


def test_compare_refuses_a_plot_that_cannot_be_written_before_any_work() -> None:
    arguments = ("compare", "--model", "mixtral-8x7b", "--plot", f"{__file__}/a.png", "--trace", "no-such-trace")
    check_refusal(command(*arguments), "--plot", "is not a folder")
