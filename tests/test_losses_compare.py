"""Objectives and rules compared: against every assignment tried, known numbers, the policies, and real text."""

import dataclasses
import itertools
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import strategies
from commands import Answer, check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from perfmodel import placement, plots
from perfmodel.bitwidth import OBJECTIVES, LossTable, optimal_bitwidths, select_bitwidths
from perfmodel.errors import PerfModelError, PolicyError, TraceError
from perfmodel.hardware import load_system
from perfmodel.losses import Calibration, assignments, heldout, rules
from perfmodel.losses.assignments import compare_assignments
from perfmodel.losses.build import build_losses
from perfmodel.losses.comparison import Comparison, readings
from perfmodel.losses.heldout import Difference, HeldOut, Prediction
from perfmodel.losses.origin import Quantisation, quantisation
from perfmodel.losses.rules import RULES
from perfmodel.routing import RoutingTrace, statistics
from perfmodel.run import make_replay, plan_run

ROOT = Path(__file__).resolve().parent.parent
BUNDLED, MINI = "tiny-mixtral-32l-losses", "tiny-mixtral-32l-mini"
LAYER_RULES = [name for name, rule in RULES.items() if rule.scope == "layer"]


@pytest.fixture(scope="module")
def mini() -> Comparison:
    return compare_assignments(LossTable.load(BUNDLED), RoutingTrace.load(MINI))


def ratio(found: Comparison, count: int, mean: float, objective: str, rule: str) -> float:
    value = found.setting(count, mean, objective).assignments[rule].ratio
    assert value is not None
    return value


# --- against everything tried one by one ---


def loop_importance(trace: RoutingTrace, alpha: float) -> np.ndarray:
    """Importance [S, L, E] from the prefill rows, one pick at a time."""
    found = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts))
    for s in range(trace.num_sequences):
        rows = trace.prefill_slice(s)
        for layer in range(trace.num_layers):
            counts, weights = np.zeros(trace.num_experts), np.zeros(trace.num_experts)
            for t in range(rows.start, rows.stop):
                for k in range(trace.top_k):
                    expert = int(trace.topk_ids[t, layer, k])
                    if expert != trace.unassigned:
                        counts[expert] += 1
                        weights[expert] += 0 if trace.topk_weights is None else trace.topk_weights[t, layer, k]
            for share, values in ((alpha, counts), (1 - alpha, weights)):
                found[s, layer] += share * values / values.sum() if values.sum() > 0 else 0
    return found


def loop_counts(trace: RoutingTrace, decode: bool) -> np.ndarray:
    found = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts))
    for s in range(trace.num_sequences):
        rows = trace.decode_slice(s) if decode else trace.prefill_slice(s)
        for t, layer in itertools.product(range(rows.start, rows.stop), range(trace.num_layers)):
            for expert in trace.topk_ids[t, layer].tolist():
                if expert != trace.unassigned:
                    found[s, layer, expert] += 1
    return found


def tried(losses: np.ndarray, weights: np.ndarray, budget: int, floor: int, order: list[int] | None) -> Any:
    """The best of all assignments [experts] of levels whose increments sum to the budget, and its loss."""
    experts, widths = losses.shape
    best: tuple[float, tuple[int, ...]] | None = None
    for levels in itertools.product(range(widths), repeat=experts):
        if order is not None and any(levels[a] < levels[b] for a, b in itertools.pairwise(order)):
            continue
        lifted = tuple(max(level, floor) for level in levels)
        if sum(lifted) != budget:
            continue
        loss = sum(weights[e] * losses[e, lifted[e]] for e in range(experts))
        if best is None or loss < best[0]:
            best = (loss, lifted)
    assert best is not None
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[LossTable, RoutingTrace, int, float, int]:
    """A table at 1, 2, 3 bits, a trace of few experts, how many are on the GPU, a mean, and a floor."""
    experts = draw(st.integers(2, 4))
    layers = tuple(range(draw(st.integers(1, 2))))
    model = strategies.plain_model(num_layers=len(layers), moe_layers=layers, num_experts=experts, top_k=2)
    seed = draw(st.integers(0, 2**32 - 1))
    lengths = [(draw(st.integers(1, 6)), draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 3)))]
    unassigned = draw(st.sampled_from([0.0, 0.2]))
    trace = strategies.small_trace(model, lengths, seed=seed, weights=draw(st.booleans()), unassigned=unassigned)
    rng = np.random.default_rng(seed)
    losses = rng.random((len(layers), experts, 3))
    if draw(st.booleans()):
        losses = -np.sort(-losses, axis=2)
    table = LossTable(losses, name="small", bits=(1, 2, 3), output_variance=rng.uniform(0.5, 2, losses.shape[:2]))
    return table, trace, draw(st.integers(0, experts - 1)), draw(st.sampled_from([1.0, 1.5, 2.0, 2.75, 3.0])), 2


@given(cases())
def test_equals_trying_every_assignment(case: tuple[LossTable, RoutingTrace, int, float, int]) -> None:
    table, trace, on_gpu, mean, min_bits = case
    found = compare_assignments(table, trace, gpu_experts=[on_gpu], mean_bits=[mean], min_bits=min_bits)
    importance = loop_importance(trace, 0.5 if trace.topk_weights is not None else 1.0)
    use, decode = loop_counts(trace, decode=False), loop_counts(trace, decode=True)
    near = table.num_experts - on_gpu
    budget = math.floor(near * (mean - 1) + 1e-9)
    sequences, layers = range(trace.num_sequences), range(trace.num_layers)
    cold = {
        (s, la): sorted(sorted(range(table.num_experts), key=lambda e, s=s, la=la: (-importance[s, la, e], e))[on_gpu:])
        for s in sequences
        for la in layers
    }
    spent = 1 + budget / near
    low = min(int(spent) - 1, 1)
    mixed = (1 - (spent - 1 - low)) * table.losses[..., low] + (spent - 1 - low) * table.losses[..., low + 1]
    uniform_decode = sum(decode[s, la, e] * mixed[la, e] for (s, la), rest in cold.items() for e in rest)
    for objective in OBJECTIVES:
        weights = {
            "plain": np.ones_like(importance),
            "importance": importance,
            "use": use,
            "variance": np.broadcast_to(1 / table.output_variance, importance.shape),
        }[objective]
        setting = found.setting(on_gpu, mean, objective)
        assert setting.spent_bits == pytest.approx(spent, rel=1e-12)
        best = {
            key: tried(table.losses[key[1]][rest], weights[key][rest], budget, 0, None) for key, rest in cold.items()
        }
        summed = {}
        for rule in ("prefix", "optimum", "floor prefix", "floor optimum"):
            floor = 1 if "floor" in rule else 0
            if floor and spent <= min_bits:
                assert rule not in setting.assignments
                continue
            results = {}
            for key, rest in cold.items():
                order = sorted(range(near), key=lambda i, key=key, rest=rest: (-importance[key][rest[i]], i))
                results[key] = tried(
                    table.losses[key[1]][rest], weights[key][rest], budget, floor, order if "prefix" in rule else None
                )
            summed[rule] = results
            ratios = [results[key][0] / best[key][0] for key in cold if best[key][0] > 0]
            one = setting.assignments[rule]
            np.testing.assert_allclose(
                one.loss, sum(loss for loss, _ in results.values()) / len(sequences), rtol=1e-9, atol=1e-12
            )
            assert (one.ratio is None) == (not ratios)
            if ratios:
                np.testing.assert_allclose(one.ratio, np.mean(ratios), rtol=1e-9, atol=0)
            if objective in ("plain", "variance") and uniform_decode > 0:  # no ties, so one assignment is the best
                cost = sum(
                    decode[s, la, e] * table.losses[la, e, level]
                    for (s, la), (_, levels) in results.items()
                    for e, level in zip(cold[s, la], levels, strict=True)
                )
                np.testing.assert_allclose(one.decode_loss, cost / decode.sum(), rtol=1e-9, atol=1e-15)
                np.testing.assert_allclose(one.decode_vs_uniform, cost / uniform_decode, rtol=1e-9, atol=1e-15)
        assert setting.zero_layers == sum(loss == 0 for loss, _ in best.values())
        even = {key: (weights[key][rest] * mixed[key[1]][rest]).sum() for key, rest in cold.items()}
        ratios = [even[key] / best[key][0] for key in cold if best[key][0] > 0]
        if ratios:
            np.testing.assert_allclose(setting.assignments["uniform"].ratio, np.mean(ratios), rtol=1e-9, atol=0)


@given(cases())
def test_whole_model_equals_one_layer_of_all_experts(case: tuple[LossTable, RoutingTrace, int, float, int]) -> None:
    """Without an order, a budget for all layers together is that of one layer that holds all their experts."""
    table, trace, _, mean, _ = case
    found = compare_assignments(table, trace, gpu_experts=[0], mean_bits=[mean])
    importance = loop_importance(trace, 0.5 if trace.topk_weights is not None else 1.0)
    layers, experts, _ = table.losses.shape
    budget = layers * math.floor(experts * (mean - 1) + 1e-9)
    for objective in ("plain", "importance"):
        setting = found.setting(0, mean, objective).assignments
        total = 0.0
        for s in range(trace.num_sequences):
            weights = importance[s].ravel() if objective == "importance" else np.ones(layers * experts)
            least = {0: 0.0}
            for weight, losses in zip(weights, table.losses.reshape(-1, 3), strict=True):
                nxt: dict[int, float] = {}
                for steps, loss in least.items():
                    for level in range(3):
                        new = loss + weight * losses[level]
                        nxt[steps + level] = min(nxt.get(steps + level, math.inf), new)
                least = nxt
            total += least[budget]
        expected = total / trace.num_sequences
        np.testing.assert_allclose(setting["model optimum"].loss, expected, rtol=1e-9, atol=1e-12)
        slack = 1e-9 * setting["optimum"].loss
        assert setting["model optimum"].loss <= setting["optimum"].loss + slack
        assert setting["model optimum"].loss <= setting["model prefix"].loss + slack
        assert setting["model prefix"].loss <= setting["prefix"].loss + slack


def test_order_of_the_rules(mini: Comparison) -> None:
    """No rule beats the optimum of its own objective and scope, and none beats hindsight in decode."""
    for one in mini.settings:
        found = one.assignments
        assert list(found) == ["uniform", *(r for r in RULES if one.mean_bits > 2 or "floor" not in r)]
        assert found["optimum"].ratio == 1.0
        for rule in found.keys() & {*LAYER_RULES, "uniform"}:
            assert found[rule].ratio >= 1 - 1e-12
            assert found[rule].decode_vs_uniform >= one.hindsight - 1e-12
        assert found["model optimum"].ratio <= found["model prefix"].ratio + 1e-12
        assert found["model optimum"].ratio <= 1 + 1e-12
        if one.mean_bits > 2:
            assert found["floor optimum"].ratio <= found["floor prefix"].ratio + 1e-12
        assert one.hindsight_model <= found["model optimum"].decode_vs_uniform + 1e-12
        assert one.hindsight_model <= one.hindsight + 1e-12
        assert found["uniform"].decode_vs_uniform == 1.0


# --- the same as policies plan ---


@pytest.mark.parametrize("rule", ["prefix", "optimum", "model prefix", "model optimum", "floor optimum", "uniform"])
@pytest.mark.parametrize(("objective", "count", "mean"), [("plain", 4, 2.0), ("importance", 2, 3.0)])
def test_decode_loss_is_that_of_the_policy(
    rule: str, objective: str, count: int, mean: float, mini: Comparison
) -> None:
    mean = 3.0 if rule.startswith("floor") else mean  # at 2 bits the floor would leave nothing to choose
    model, trace = strategies.mixtral(), strategies.recording()
    selector = {"prefix": "prefix", "optimum": "optimum"}.get(rule.split()[-1], "uniform")
    options = f"mean_bits={mean:g},gpu_experts={count},selector={selector},objective={objective}"
    options += ",scope=model" * rule.startswith("model") + ",min_bits=2" * rule.startswith("floor")
    if rule == "uniform":
        options = f"mean_bits={mean:g},gpu_experts={count},selector=uniform"
    planned = plan_run(model, load_system("h100-cxl2-ndp"), make_replay(model, trace), f"context-aware:{options}")
    expected = mini.setting(count, mean, objective).assignments[rule]
    np.testing.assert_allclose(planned.quality.loss, expected.decode_loss, rtol=1e-12, atol=0)
    np.testing.assert_allclose(planned.quality.vs_uniform, expected.decode_vs_uniform, rtol=1e-12, atol=0)


# --- known numbers ---


@pytest.fixture(scope="module")
def whole(shared: Path) -> Comparison:
    folder = shared / "tiny-mixtral"
    trace = RoutingTrace.load(folder / "tiny-mixtral-32l.npz")
    return compare_assignments(LossTable.load(folder / "loss_table.npz"), trace)


@pytest.mark.parametrize(
    ("count", "plain", "weighted"),
    [(0, (1.069, 1.102), (1.025, 1.626)), (2, (1.064, 1.098), (1.024, 1.459)), (4, (1.053, 1.092), (1.017, 1.397))],
)
def test_known_ratios_at_two_bits(
    whole: Comparison, count: int, plain: tuple[float, float], weighted: tuple[float, float]
) -> None:
    for objective, expected in (("plain", plain), ("importance", weighted)):
        found = [ratio(whole, count, 2.0, objective, rule) for rule in ("prefix", "uniform")]
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.001)


def test_known_ratios_at_three_bits(whole: Comparison) -> None:
    for count in (0, 2, 4):
        for rule in ("prefix", "uniform", "random"):
            assert ratio(whole, count, 3.0, "plain", rule) == pytest.approx(1.0, abs=5e-4)
        assert 1.0005 < ratio(whole, count, 3.0, "importance", "prefix") < 1.0055
        assert 1.085 < ratio(whole, count, 3.0, "importance", "uniform") < 1.185


def test_known_random_order_and_whole_model(whole: Comparison) -> None:
    for count in (0, 2, 4):
        assert ratio(whole, count, 2.0, "plain", "random") == pytest.approx(1.06, abs=0.01)
        for rule in ("model prefix", "model optimum"):
            assert 1 / ratio(whole, count, 2.0, "plain", rule) == pytest.approx(2.1, abs=0.06)


def test_readings_say_what_the_numbers_say(whole: Comparison) -> None:
    found = readings(whole)
    assert {line.partition(": ")[0] for line in found} == {f"at {n} bits (mean over K = 0, 2, 4)" for n in (2, 3)}
    at2, at3 = ([line.partition(": ")[2] for line in found if line.startswith(f"at {n} ")] for n in (2, 3))
    ratios = [np.mean([ratio(whole, k, 2.0, "plain", rule) for k in (0, 2, 4)]) for rule in ("prefix", "random")]
    assert at2[0] == (
        "of the plain sum, the order by importance is no different from a random one:"
        f" {ratios[0]:.3f} and {ratios[1]:.3f} of the optimum"
    )
    assert at2[1].startswith("in decode, under the same objective, the order by importance is better than a random one")
    assert re.fullmatch(
        "with one budget a layer, decode loses least by optimum under importance: 0.75[0-9] of uniform bits", at2[2]
    )
    assert len(at2) == 4
    assert at3[:2] == [
        "uniform bits are the optimum of the plain sum",
        "with one budget a layer, nothing loses less in decode than uniform bits",
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sequences", [1, 6])
def test_an_order_that_knows_nothing_is_no_different_from_a_random_one(seed: int, sequences: int) -> None:
    """Losses that have nothing to do with routing: what is left of a difference is chance."""
    trace = RoutingTrace.load(MINI).sequences(range(sequences))
    found = compare_assignments(random_table(seed), trace, mean_bits=[2])
    (line,) = [line for line in readings(found) if "of the plain sum, the order" in line]
    assert "is no different from a random one" in line


def test_an_order_that_knows_is_better_or_worse() -> None:
    """Experts whose losses follow, or run against, the importance of every sequence alike."""
    trace = RoutingTrace.load(MINI).sequences([0])
    rank = np.argsort(np.argsort(placement.importance(trace).values[0], axis=-1), axis=-1)
    for factor, word in ((rank + 1.0, "better than"), (8.0 - rank, "worse than")):
        table = LossTable(factor[..., None] * [8.0, 4.0, 2.0, 1.0], name="known")
        first, *_ = readings(compare_assignments(table, trace, gpu_experts=[0], mean_bits=[2.5]))
        assert f"at 2.5 bits (K = 0): of the plain sum, the order by importance is {word} a random one" in first


def test_noise_is_that_of_sequences_and_random_orders(mini: Comparison) -> None:
    one = mini.setting(0, 2.0, "plain")
    table, trace = LossTable.load(BUNDLED), RoutingTrace.load(MINI)
    importance = placement.importance(trace).values
    orders = np.random.default_rng([0, 0]).random((6, 4, 32, 8))
    decode = statistics.selection_counts(trace, "decode").astype(float)
    best = cost(table, optimal_bitwidths(table.losses, 2.0))
    prefix = select_bitwidths(importance, table.losses, 2.0)
    drawn = np.stack([select_bitwidths(orders[:, d], table.losses, 2.0) for d in range(4)])
    uniform = (table.losses[..., 1] * decode).sum() / 6
    for noise, random, ordered in (
        (one.ratio_noise, (cost(table, drawn) / best).mean(axis=-1), (cost(table, prefix) / best).mean(axis=-1)),
        (
            one.decode_noise,
            cost(table, drawn, decode).sum(axis=-1) / uniform,
            cost(table, prefix, decode).sum(axis=-1) / uniform,
        ),
    ):
        gap = random.mean(axis=0) - ordered
        expected = math.hypot(np.std(gap, ddof=1) / math.sqrt(6), np.sqrt(np.var(random, axis=0, ddof=1).mean() / 6))
        np.testing.assert_allclose(noise, expected, rtol=1e-9, atol=0)


def random_table(seed: int) -> LossTable:
    losses = np.random.default_rng(seed).random((32, 8, 4))
    return LossTable(-np.sort(-losses, axis=2), name="random", output_variance=np.ones((32, 8)))


def cost(table: LossTable, bits: np.ndarray, weights: np.ndarray | float = 1.0) -> np.ndarray:
    """Summed loss of every layer [..., L]."""
    losses = np.broadcast_to(table.losses, (*bits.shape, 4))
    chosen = np.take_along_axis(losses, bits[..., None].astype(int) - 1, axis=-1)[..., 0]
    return (chosen * weights).sum(axis=-1)


# --- what is held fixed, and what varies ---


def test_seed_moves_random_orders_alone(mini: Comparison) -> None:
    table, trace = LossTable.load(BUNDLED), RoutingTrace.load(MINI)
    assert compare_assignments(table, trace) == mini
    for one, other in zip(mini.settings, compare_assignments(table, trace, seed=1).settings, strict=True):
        for rule in one.assignments:
            if rule != "random":
                assert one.assignments[rule] == other.assignments[rule]
    assert mini.settings[0].assignments["random"] != compare_assignments(table, trace, seed=1).settings[0].assignments


def test_how_many_sequences_are_worked_on_at_once_changes_nothing(
    mini: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assignments, "_CHUNK", 2 * 32 * 8 * 4)
    found = compare_assignments(LossTable.load(BUNDLED), RoutingTrace.load(MINI))
    for one, other in zip(mini.settings, found.settings, strict=True):
        for rule, expected in one.assignments.items():
            np.testing.assert_allclose(other.assignments[rule], expected, rtol=1e-12, atol=0)


def test_whole_model_budgets_of_some_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little time, they are those of the sequences at both ends and between, and the result says so."""
    table, trace = LossTable.load(BUNDLED), RoutingTrace.load(MINI)
    options: Any = {"gpu_experts": [2], "mean_bits": [2]}
    monkeypatch.setattr(assignments, "_MOST_MERGED", 2.5 * 2 * 5 * (32 * 6) ** 2)
    found = compare_assignments(table, trace, **options)
    assert "budgets for the whole model: 2 of 6 sequences, to save time" in found.notes
    few = compare_assignments(table, trace.sequences([0, 5]), **options)
    assert not few.notes
    for one, other in zip(found.settings, few.settings, strict=True):
        assert one.assignments["model optimum"] == other.assignments["model optimum"]
        assert one.hindsight_model == other.hindsight_model


def test_means_between_widths() -> None:
    """Whole increments are spent; uniform bits get the same, as the mix of two widths."""
    table, trace = LossTable.load(BUNDLED), RoutingTrace.load(MINI)
    found = compare_assignments(table, trace, gpu_experts=[1], mean_bits=[2.4])
    setting = found.setting(1, 2.4, "plain")
    assert setting.spent_bits == pytest.approx(1 + 9 / 7)
    importance = placement.importance(trace).values
    hot = statistics.top_experts(importance, 1)
    share = setting.spent_bits - 2
    mixed = (1 - share) * table.losses[..., 1] + share * table.losses[..., 2]
    expected = (mixed * ~hot).sum() / trace.num_sequences
    assert setting.assignments["uniform"].loss == pytest.approx(expected, rel=1e-12)
    text = run("losses", "compare", BUNDLED, "--gpu-experts", "1", "--mean-bits", "2.4").out
    assert "Whole increments above 1 bit spend a mean of 2.4 as 2.286; uniform bits are given the same." in text
    assert "uniform between two widths: the linear mix of the two next to it." in text


@pytest.mark.parametrize(("mean", "experts", "expected"), [(2.3, 10, 2.3), (2.39, 10, 2.3), (1.1, 10, 1.1), (4, 7, 4)])
def test_spent_bits(mean: float, experts: int, expected: float) -> None:
    """A product below a whole number by rounding alone, as 10 * (2.3 - 1), counts as that number."""
    assert rules.spent_bits(mean, experts, (1, 2, 3, 4)) == pytest.approx(expected, rel=1e-12)
    assert rules.spent_bits(mean + 1, experts, (2, 3, 5)) == pytest.approx(expected + 1, rel=1e-12)


def test_other_menus_take_budgets_as_ceilings() -> None:
    rng = np.random.default_rng(3)
    losses = -np.sort(-rng.random((32, 8, 3)), axis=2)
    table = LossTable(losses, name="wide", bits=(2, 4, 8))
    found = compare_assignments(table, RoutingTrace.load(MINI), gpu_experts=[1], mean_bits=[3.0])
    assert found.budget == "at-most"
    assert any("gaps" in note for note in found.notes)
    assert any("no output variances" in note for note in found.notes)
    assert found.objectives == ["plain", "importance", "use"]
    assert "floor prefix" not in found.rules  # the floor of 2 bits is the lowest width anyway
    with pytest.raises(PolicyError, match="at-most"):
        compare_assignments(table, RoutingTrace.load(MINI), gpu_experts=[1], mean_bits=[3.0], budget="exact")


def test_uniform_bits_that_no_layer_can_have(tmp_path: Path) -> None:
    """One near-data expert cannot have 3 bits of 2, 4 and 8; four can, as two at 2 and two at 4."""
    losses = np.random.default_rng(3).uniform(0.8, 1.2, (32, 8, 3)) * [16.0, 4.0, 1.0]
    np.savez(tmp_path / "wide.npz", losses=losses, bits=[2, 4, 8])
    found = compare_assignments(
        LossTable.load(tmp_path / "wide.npz"), RoutingTrace.load(MINI), gpu_experts=[4, 7], mean_bits=[3, 4]
    )
    assert [found.setting(k, 3.0, "plain").uniform_exists for k in (4, 7)] == [True, False]
    at4, seven = found.setting(4, 3.0, "plain").assignments, found.setting(7, 3.0, "plain").assignments
    assert at4["uniform"].ratio > 1
    assert seven["uniform"].ratio < 1  # a mix cheaper than what one expert can have
    lines = [line for line in readings(found) if line.startswith("at 3 ")]
    assert not any("uniform bits are" in line or "nothing loses" in line for line in lines)
    mix = "of uniform bits (at K = 7 a mix of widths that no layer can have)"
    assert [line.endswith(mix) for line in lines] == [False, True, True, True]
    answer = run("losses", "compare", tmp_path / "wide.npz", "--gpu-experts", "4,7", "--mean-bits", "3")
    assert "which not every number of near-data experts allows" in answer.out
    (row,) = [line.split() for line in answer.out.splitlines() if line.startswith("7  3     plain")][:1]
    assert row[4] == f"{seven['uniform'].ratio:.3f}"  # without a star


def test_an_optimum_holds_for_every_number_of_gpu_experts(mini: Comparison) -> None:
    """A mean of 1 over K says nothing where one ratio lies above it and another below."""
    line = "uniform bits are the optimum of the plain sum"
    assert f"at 3 bits (mean over K = 0, 2, 4): {line}" in readings(mini)
    settings = []
    for one in mini.settings:
        moved = one.assignments["uniform"]
        ratio_ = {0: 1.02, 2: 0.98, 4: 1.0}[one.gpu_experts]
        settings.append(
            dataclasses.replace(one, assignments={**one.assignments, "uniform": moved._replace(ratio=ratio_)})
        )
    assert not any(line in found for found in readings(dataclasses.replace(mini, settings=tuple(settings))))


def test_verdicts_do_not_contradict_stars() -> None:
    """One floor reaches 0.992 of uniform bits, which is less than the margin, and starred all the same."""
    found = compare_assignments(LossTable.load(BUNDLED), RoutingTrace.load(MINI), gpu_experts=[0], mean_bits=[3])
    starred = found.setting(0, 3.0, "importance").assignments["floor optimum"].decode_vs_uniform
    assert 0.99 < min(starred, 0.9949) < 0.9995
    words = "with one budget a layer, nothing loses more than 1 % less in decode than uniform bits"
    assert f"at 3 bits (K = 0): {words}" in readings(found)


@pytest.mark.parametrize("size", [1e300, 1.7e308])
def test_enormous_losses_are_refused(tmp_path: Path, size: float) -> None:
    np.savez(tmp_path / "huge.npz", losses=np.random.default_rng(0).random((32, 8, 4)) * size)
    answer = run("losses", "compare", tmp_path / "huge.npz", "--json")
    check_refusal(answer, "'huge'", "too large to be compared", "give them in a larger unit")


def test_large_losses_are_compared_without_overflow() -> None:
    found = compare_assignments(
        LossTable(table_of(8).losses * 1e119, name="large", output_variance=np.ones((3, 8))), trace_of(8, [(9, 9)] * 3)
    )
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert "e+11" in text  # the losses are there, as large as they are


def test_losses_of_another_model_than_the_routing_are_noted(mini: Comparison) -> None:
    assert not any("the routing of" in note for note in mini.notes)
    table = LossTable(table_of(8).losses, name="other", info={"model": "owner/Other"})
    found = compare_assignments(table, trace_of(8, [(9, 9)]), gpu_experts=[0], mean_bits=[2])
    assert "the losses are of 'owner/Other', the routing of 'small'" in found.notes
    same = LossTable(table_of(8).losses, name="same", info={"model": "owner/Small"})
    notes = compare_assignments(same, trace_of(8, [(9, 9)]), gpu_experts=[0], mean_bits=[2]).notes
    assert not any("the routing of" in note for note in notes)


def test_a_single_width_is_the_only_mean() -> None:
    table = LossTable(table_of(8).losses[..., :1], name="one", bits=(3,))
    with pytest.raises(PolicyError, match="mean_bits is 2; it must be 3, the only width"):
        compare_assignments(table, trace_of(8, [(9, 9)]), mean_bits=[2])


# --- traces of all kinds ---


def trace_of(experts: int, lengths: list[tuple[int, int]], **options: Any) -> RoutingTrace:
    model = strategies.plain_model(num_experts=experts, top_k=min(4, experts))
    return strategies.small_trace(model, lengths, seed=5, **options)


def table_of(experts: int, layers: int = 3) -> LossTable:
    rng = np.random.default_rng(11)
    return LossTable(
        -np.sort(-rng.random((layers, experts, 4)), axis=2), name="made", output_variance=np.ones((layers, experts))
    )


def test_many_experts_without_weights() -> None:
    found = compare_assignments(table_of(64), trace_of(64, [(40, 30), (25, 10)], weights=False))
    assert found.gpu_experts == [0, 16, 32]
    assert any("alpha forced" in note for note in found.notes)
    assert all(one.assignments["optimum"].ratio in (1.0, None) for one in found.settings)


def test_without_prefill_the_other_sequences_tell() -> None:
    trace = trace_of(8, [(0, 30), (0, 20), (0, 10)])
    found = compare_assignments(table_of(8), trace, gpu_experts=[2], mean_bits=[2])
    assert any("decode steps of the other sequences" in note for note in found.notes)
    profile = placement.importance_of_others(trace.replay()).values
    hot = statistics.top_experts(profile, 2)
    decode = statistics.selection_counts(trace, "decode")
    table = table_of(8)
    uniform = (decode * ~hot * table.losses[..., 1]).sum() / decode.sum()
    found_loss = found.setting(2, 2, "plain").assignments["uniform"].decode_loss
    assert found_loss == pytest.approx(uniform, rel=1e-12)
    with pytest.raises(PolicyError, match="at least 2 sequences"):
        compare_assignments(table, trace.sequences([0]))


def test_without_decode_nothing_is_said_of_it(tmp_path: Path) -> None:
    trace = trace_of(8, [(30, 0), (20, 0)])
    found = compare_assignments(table_of(8), trace)
    assert any("no decode steps" in note for note in found.notes)
    assert {one.decode_vs_uniform for s in found.settings for one in s.assignments.values()} == {None}
    assert {s.hindsight for s in found.settings} == {None}
    json.dumps(found.to_dict(), allow_nan=False)
    assert "decode loses" not in " ".join(readings(found))
    plots.save(plots.assignments_figure(found), tmp_path / "a.png")


def test_layers_are_cut_or_cycled_with_a_note(mini: Comparison) -> None:
    table = LossTable.load(BUNDLED)
    short = LossTable(table.losses[:5], name="short", output_variance=table.output_variance[:5])
    found = compare_assignments(short, RoutingTrace.load(MINI), gpu_experts=[0], mean_bits=[2])
    assert any("5 layers is cycled to 32 layers" in note for note in found.notes)
    assert not mini.notes


def test_a_layer_whose_optimum_is_zero_is_left_out() -> None:
    losses = table_of(4).losses.copy()
    losses[1] = 0.0
    found = compare_assignments(LossTable(losses, name="zero"), trace_of(4, [(9, 9)]), gpu_experts=[0], mean_bits=[2])
    assert [one.zero_layers for one in found.settings if one.objective == "plain"] == [1]
    losses[:] = 0.0
    found = compare_assignments(LossTable(losses, name="zero"), trace_of(4, [(9, 9)]), gpu_experts=[0], mean_bits=[2])
    assert found.settings[0].assignments["prefix"].ratio is None
    assert readings(found) == ["at 2 bits (K = 0): nothing can be said"]


def test_numbers_of_experts_must_agree() -> None:
    with pytest.raises(TraceError, match="'made' has 8 experts a layer, the trace of 'small' 4"):
        compare_assignments(table_of(8), trace_of(4, [(3, 3)]))
    known = trace_of(4, [(6, 6)])
    inferred = known.with_metadata(num_experts_inferred=True)
    found = compare_assignments(table_of(8), inferred)
    assert found.experts == 8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu_experts": [8]}, "gpu_experts is 8; it must be a whole number from 0 to 7"),
        ({"table": None}, "table is None; it must be a LossTable"),
        ({"trace": None}, "trace is None; it must be a RoutingTrace"),
        ({"trace": 3}, "trace is 3"),
        ({"gpu_experts": [True]}, "gpu_experts is True"),
        ({"gpu_experts": [1.5]}, "gpu_experts is 1.5"),
        ({"gpu_experts": []}, "gpu_experts is ..; it must be a list"),
        ({"gpu_experts": 4}, "gpu_experts is 4; it must be a list"),
        ({"mean_bits": [4.5]}, "mean_bits is 4.5; it must be a number from 1 to 4"),
        ({"mean_bits": [math.nan]}, "mean_bits is nan"),
        ({"mean_bits": ["2"]}, "mean_bits is '2'"),
        ({"mean_bits": ()}, "mean_bits is ..; it must be a list"),
        ({"mean_bits": "23"}, "mean_bits is '23'"),
        ({"min_bits": 0}, "min_bits is 0"),
        ({"min_bits": 5}, "min_bits is 5; it must be a whole number from 1 to 4"),
        ({"min_bits": 2.0}, "min_bits is 2.0"),
        ({"budget": "about"}, "budget is 'about'; it must be 'exact' or 'at-most'"),
        ({"alpha": 1.5}, "alpha is 1.5; it must be a number from 0 to 1"),
        ({"alpha": "half"}, "alpha is 'half'"),
        ({"norm": "max"}, "norm"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": "a"}, "seed is 'a'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        compare_assignments(**{"table": LossTable.load(BUNDLED), "trace": RoutingTrace.load(MINI), **options})


# --- the command ---


def test_json_holds_what_was_found(mini: Comparison) -> None:
    found = run("losses", "compare", BUNDLED, "--json").document
    assert found == {**json.loads(json.dumps(mini.to_dict())), "held_out": None}
    assert found["settings"][0]["assignments"]["prefix"]["ratio"] == ratio(mini, 0, 2.0, "plain", "prefix")


def test_text_holds_every_number(mini: Comparison) -> None:
    text = run("losses", "compare", BUNDLED).out
    first, second = text.split("What the same assignments lose")
    assert first.index("objective: plain sum") < first.index("K  bits  objective")  # the legend comes first
    assert "random order (4 of them, seed 0)" in first
    rows = {tuple(line.split()[:3]): line.split()[3:] for line in first.splitlines() if line[:1].isdigit()}
    decode = {tuple(line.split()[:3]): line.split()[3:] for line in second.splitlines() if line[:1].isdigit()}
    rules = ["uniform", *RULES]
    assert "optimum (sum)  uniform   random   prefix   floor: prefix   floor: optimum   model: prefix" in first

    def cells(one: Any, shown: list[str], what: str, most: float) -> list[str]:
        """Figures in the order of the rules, with a star at the least of those that share a kind of budget."""
        figures = {r: f"{getattr(one.assignments[r], what):.3f}" for r in shown if r in one.assignments}
        starred = set()
        for kind in (True, False):
            group = {r: figure for r, figure in figures.items() if r.startswith("model") == kind}
            least = min(group.values(), key=float)
            if len(set(group.values())) > 1 and float(least) < most:
                starred |= {r for r, figure in group.items() if figure == least}
        return [figures.get(r, "-") + "*" * (r in starred) for r in shown]

    for one in mini.settings:
        key = (str(one.gpu_experts), f"{one.mean_bits:g}", one.objective)
        assert rows[key][1:] == cells(one, [r for r in rules if r != "optimum"], "ratio", math.inf)
        assert decode[key][1:] == cells(one, rules[1:], "decode_vs_uniform", 1.0)
        assert decode[(*key[:2], "(hindsight)")] == [f"{one.hindsight:.3f}", f"{one.hindsight_model:.3f}"]
    assert "*" in first
    lines = text.splitlines()
    for line in readings(mini):
        assert f"{line[0].upper()}{line[1:]}." in lines
    only = run("losses", "compare", BUNDLED, "--mean-bits", "2").out
    assert "floor" not in only  # it would be uniform bits


def test_bad_input_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, words: tuple[str, ...]) -> None:
        check_refusal(run("losses", "compare", BUNDLED, *arguments), *words)

    refused("--gpu-experts", "0,x", words=("--gpu-experts", "'0,x'", "whole numbers"))
    refused("--gpu-experts", "9", words=("gpu_experts is 9", "0 to 7"))
    refused("--mean-bits", "2;3", words=("--mean-bits", "'2;3'"))
    refused("--mean-bits", "inf", words=("mean_bits is inf",))
    refused("--min-bits", "7", words=("min_bits is 7",))
    refused("--alpha", "nan", words=("alpha",))
    refused("--norm", "mean", words=("--norm", "min-max"))
    refused("--seed", "-3", words=("seed is -3",))
    refused("--trace", "tiny-mixtral", words=("tiny-mixtral", MINI))
    refused("--trace", tmp_path / "no.npz", words=("no.npz",))
    refused("--plot", tmp_path / "a.gif", words=(".gif",))
    refused("--plot", Path(__file__) / "a.png", words=("--plot", "is not a folder"))
    refused("--checkpoint", tmp_path, words=("--checkpoint", "--text"))
    refused("--text", "a.txt", words=("--text", "--checkpoint"))
    refused("--tokens", "5", words=("--tokens", "--checkpoint and --text"))
    check_refusal(run("losses", "compare", "no-such-table"), "no-such-table", BUNDLED)
    monkeypatch.setitem(sys.modules, "torch", None)
    refused("--checkpoint", "a", "--text", "b", words=("torch", "pip install 'perfmodel[record]'"))
    assert not list(tmp_path.iterdir())


def test_methods_that_cannot_be_tried_are_refused() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    text = ("losses", "compare", BUNDLED, "--checkpoint", "a", "--text", "b")
    check_refusal(run(*text), BUNDLED, "gptq", "--calibration FILE, or --method rtn")
    check_refusal(run(*text, "--method", "gptq"), "--calibration")
    check_refusal(run(*text, "--method", "rtn", "--calibration", "c"), "--calibration", "rounding to nearest")


# --- the figure ---


def test_figure_shows_every_ratio(mini: Comparison) -> None:
    figure = plots.assignments_figure(mini)
    titles = [axes for axes in figure.axes if not axes.axison]
    assert [axes.texts[0].get_text()[:4] for axes in titles] == ["Loss", "What"]
    drawn = [axes for axes in figure.axes if axes.axison]
    panels = {(axes.get_title(loc="left"), i // 6): axes for i, axes in enumerate(drawn)}
    assert len(panels) == 12
    for (title, part), axes in panels.items():
        count, mean = int(title.split()[0]), float(title.split()[3])
        series = [line for line in axes.lines if line.get_marker() in "os^D"]
        assert len(series) == 4
        for line, objective in zip(series, mini.objectives, strict=True):
            field = ("ratio", "decode_vs_uniform")[part]
            found = mini.setting(count, mean, objective).assignments
            np.testing.assert_allclose(line.get_xdata(), [getattr(found[r], field) for r in found], rtol=1e-12)
            np.testing.assert_allclose(np.round(line.get_ydata()), range(len(found)), atol=0)
        # Marks of one rule lie apart even where their values are the same.
        figure.draw_without_rendering()
        height = axes.get_window_extent().height / figure.dpi * 72 / abs(np.diff(axes.get_ylim())[0])
        offsets = sorted(float(line.get_ydata()[0]) for line in series)
        assert min(np.diff(offsets)) * height >= 3.4
        least = {float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "|"}
        one = mini.setting(count, mean, "plain")
        assert least == ({one.hindsight, one.hindsight_model} if part else set())
        low, high = axes.get_xlim()
        values = np.concatenate([line.get_xdata() for line in series])
        assert low < values.min() <= values.max() < high


def test_figure_fits_on_the_page(mini: Comparison) -> None:
    many = compare_assignments(
        LossTable.load(BUNDLED), RoutingTrace.load(MINI), gpu_experts=[0, 1, 2, 3], mean_bits=[1.5, 2, 2.5, 3]
    )
    for found in (mini, many):
        figure = plots.assignments_figure(found)
        figure.draw_without_rendering()
        width, height = figure.bbox.size
        for text in figure.findobj(Text):
            if text.get_text().strip() and text.get_visible():
                box = text.get_window_extent()
                if 0 <= (box.x0 + box.x1) / 2 <= width and 0 <= (box.y0 + box.y1) / 2 <= height:
                    assert box.x0 >= -1, text
                    assert box.x1 <= width + 1, text
                assert text.get_fontsize() >= 7
        words = " ".join(figure.get_supxlabel().split())
        assert ("Left out: 1 numbers of GPU experts, 1 means." in words) == (found is many)


def made_up() -> HeldOut:
    """What text could have shown; one assignment adds nothing."""
    rows = [
        ("stored precision", None, 0.0, 0.0),
        ("uniform", 2.0, 3.0, 0.2),
        ("uniform", 3.0, 1.0, 0.05),
        ("plain, optimum", 2.0, 2.0, 0.4),
        ("importance, model optimum", 2.0, 1.5, 0.1),
        ("variance, prefix", 3.0, 0.9, -0.01),
    ]
    level = {2.0: 0.2, 3.0: 0.05}
    made = [
        Prediction(
            *(None if mean is None else 0, name, mean, loss, loss / 8, 0.1, 4 + added, Difference(added, 0.01)),
            None if mean is None else Difference(added - level[mean], 0.02),
            None,
        )
        for name, mean, loss, added in rows
    ]
    made.append(made[-1]._replace(assignment="use, prefix", same_as="variance, prefix"))
    quantised = Quantisation("rtn", None, "auto", "natural", ())
    return HeldOut("model", quantised, ("a.txt",), 1000, 1, (0,), (), tuple(made))


def test_figure_with_text(mini: Comparison) -> None:
    figure = plots.assignments_figure(mini, made_up())
    at2, at3 = (axes for axes in figure.axes if axes.get_title(loc="left").endswith("text"))
    assert [axes.get_title(loc="left") for axes in (at2, at3)] == ["0 on GPU, 2 bits, text", "0 on GPU, 3 bits, text"]
    assert at3.get_xlabel() == "over uniform bits (nat/token)"
    assert at2.get_xlim() == at3.get_xlim()
    for axes, expected in ((at2, {"optimum": 0.2, "model: optimum": -0.1}), (at3, {"prefix": -0.06})):
        labels = [label.get_text() for label in axes.get_yticklabels()]
        points = [line for line in axes.lines if line.get_marker() in list("os^D")]
        assert {labels[round(line.get_ydata()[0])]: round(float(line.get_xdata()[0]), 9) for line in points} == expected
        bars = [segment for one in axes.collections for segment in one.get_segments()]
        np.testing.assert_allclose([np.ptp(bar[:, 0]) for bar in bars], 0.04, rtol=1e-9, atol=0)
        assert axes.get_xscale() == "linear"
        low, high = axes.get_xlim()
        assert all(low < bar[:, 0].min() <= bar[:, 0].max() < high for bar in bars)
    words = " ".join(figure.get_supxlabel().split())
    assert "whose loss is 4.000 nat/token at the stored precision; 1000 tokens" in words
    assert "equal assignments are drawn once" in words


def test_figure_with_text_at_a_mean_without_uniform_bits(mini: Comparison) -> None:
    rows = [one._replace(over_uniform=None) if one.mean_bits == 2 else one for one in made_up().rows]
    figure = plots.assignments_figure(mini, dataclasses.replace(made_up(), rows=tuple(rows)))
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left").endswith("text")] == [
        "0 on GPU, 3 bits, text"
    ]
    assert "Nothing to set beside uniform bits at 2 bits." in " ".join(figure.get_supxlabel().split())


def test_readings_of_text() -> None:
    best, at3 = heldout.readings(made_up())
    assert best == (
        "at 2 bits (K = 0): the best model is importance, model: optimum, -0.100 +- 0.020 nats a token over uniform"
        " bits"
    )
    assert at3 == (
        "at 3 bits (K = 0): nothing is surely better than uniform bits; the best try is variance, prefix,"
        " -0.060 +- 0.020 nats a token over uniform bits"
    )
    worse = dataclasses.replace(made_up(), rows=made_up().rows[:4])
    assert heldout.readings(worse)[:2] == [
        "at 2 bits (K = 0): no assignment makes a better model than uniform bits",
        "at 2 bits (K = 0): the smallest summed loss, plain, optimum, gives +0.200 +- 0.020 nats a token over uniform"
        " bits",
    ]


@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(1, 500)), min_size=1, max_size=8))
def test_difference_and_its_error(parts: list[tuple[float, int]]) -> None:
    values, tokens = zip(*parts, strict=True)
    found = heldout._difference(np.array(values), np.array(tokens, float))
    mean = sum(v * t for v, t in parts) / sum(tokens)
    assert found.nats == pytest.approx(mean, rel=1e-9, abs=1e-12)
    if len(parts) < 5 or not any(values):
        assert found.error is None
        return
    spread = sum((t * (v - mean)) ** 2 for v, t in parts) / sum(tokens) ** 2 * len(parts) / (len(parts) - 1)
    assert found.error == pytest.approx(math.sqrt(spread), rel=1e-9, abs=1e-12)
    if len(set(tokens)) == 1:  # the standard error of a mean of equal parts
        assert found.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(parts)), rel=1e-9, abs=1e-12)


# --- text ---


class Place(NamedTuple):
    """A small model, text, and the table and trace files that fit it."""

    checkpoint: Path
    texts: list[Path]
    table: Path
    trace: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import recorded

    folder = tmp_path_factory.mktemp("text")
    table = table_of(recorded.EXPERTS, recorded.LAYERS)
    np.savez(folder / "table.npz", losses=table.losses, output_variance=table.output_variance)
    model = strategies.plain_model(num_experts=recorded.EXPERTS, top_k=recorded.TOP_K)
    strategies.small_trace(model, [(20, 10), (10, 5)], seed=3).save(folder / "trace.npz")
    checkpoint = recorded.save_model(recorded.make_model(), folder / "toy-moe")
    return Place(checkpoint, recorded.write_texts(folder / "texts"), folder / "table.npz", folder / "trace.npz")


def held_out(place: Place, *options: Any) -> Answer:
    return run(
        *("losses", "compare", place.table, "--trace", place.trace, "--checkpoint", place.checkpoint),
        *("--text", *place.texts, *options),
    )


def test_held_out_loss_is_that_of_the_assignments(place: Place, tmp_path: Path) -> None:
    from perfmodel.losses.record.language_model import QuantisedModel, quantiser

    answer = held_out(place, "--mean-bits", "2,2.5", "--json", "--plot", tmp_path / "a.png")
    found = answer.document["held_out"]
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert (found["method"], found["checkpoint"], found["gpu_experts"]) == ("rtn", "toy-moe", [0])
    assert found["not_tried"] == [1, 2]
    rows = {(row["assignment"], row["mean_bits"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 1 + 4 + 4 * (len(RULES) - 2 + len(RULES))
    table, trace = LossTable.load(place.table), RoutingTrace.load(place.trace)
    pooled = placement.importance(trace).values.mean(axis=0)
    use = statistics.selection_counts(trace, "prefill").sum(axis=0).astype(float)
    order = np.random.default_rng([0, 0]).random((1, 4, *pooled.shape))[0, 0]
    expected = {
        ("stored precision", None): np.zeros(pooled.shape, np.int64),
        ("uniform", 3.0): np.full(pooled.shape, 3),
        ("plain, optimum", 2.5): optimal_bitwidths(table.losses, 2.5),
        ("plain, prefix", 2.0): select_bitwidths(pooled, table.losses, 2.0),
        ("plain, random", 2.0): select_bitwidths(order, table.losses, 2.0),
        ("use, model prefix", 2.0): select_bitwidths(pooled, table.losses, 2.0, weights=use, scope="model"),
        ("importance, prefix", 2.5): select_bitwidths(pooled, table.losses, 2.5, weights=pooled),
        ("importance, floor prefix", 2.5): select_bitwidths(pooled, table.losses, 2.5, weights=pooled, min_bits=2),
        ("importance, floor optimum", 2.5): optimal_bitwidths(table.losses, 2.5, weights=pooled, min_bits=2),
        ("variance, model optimum", 2.0): optimal_bitwidths(table.losses, 2.0, scope="model"),
    }
    model = QuantisedModel(place.checkpoint, quantiser("rtn"))
    windows = model.windows(place.texts)
    assert found["tokens"] == sum(len(window) - 1 for window in windows)
    stored = model.loss(windows)
    for key, bits in expected.items():
        row = rows[key]
        nats = model.loss(windows, bits.astype(np.int64))
        np.testing.assert_allclose(row["nats"], nats, rtol=1e-5, atol=0)
        np.testing.assert_allclose(row["added"]["nats"], nats - stored, rtol=0, atol=1e-5 * stored)
        if key[1] is not None:
            chosen = np.take_along_axis(table.losses, bits[..., None].astype(int) - 1, axis=-1)[..., 0]
            np.testing.assert_allclose(row["summed_loss"], chosen.sum(), rtol=1e-12, atol=0)
            assert row["lowest_share"] == (bits == 1).mean()
            np.testing.assert_allclose(row["weighted_loss"], (pooled * chosen).sum(), rtol=1e-12, atol=0)
        if key[1] == 2.0:
            uniform = rows["uniform", 2.0]["nats"]
            np.testing.assert_allclose(row["over_uniform"]["nats"], row["nats"] - uniform, rtol=0, atol=1e-9)
        elif key[1] == 2.5:
            assert row["over_uniform"] is None
    assert rows["stored precision", None]["added"] == {"nats": 0.0, "error": None}
    for row in found["rows"]:  # what is said to be the same, is
        if row["same_as"] is not None:
            (first,) = [one for one in found["rows"] if one["assignment"] == row["same_as"]][:1] or [None]
            assert first is not None
            assert row["summed_loss"] in [
                one["summed_loss"] for one in found["rows"] if one["assignment"] == row["same_as"]
            ]
    assert {line.partition(":")[0] for line in found["readings"]} == {"at 2 bits (K = 0)"}
    (note,) = found["notes"]
    assert "does not say how its weights were quantised; assumed: rtn, one scale a row" in note


def test_experts_on_the_gpu_stay_as_they_are(place: Place) -> None:
    from perfmodel.losses.record.language_model import QuantisedModel, quantiser

    options = ("--mean-bits", "2", "--gpu-experts", "1,3", "--tokens", "300")
    found = held_out(place, *options, "--json").document["held_out"]
    assert (found["gpu_experts"], found["not_tried"]) == ([1, 3], [])
    table, trace = LossTable.load(place.table), RoutingTrace.load(place.trace)
    pooled = placement.importance(trace).values.mean(axis=0)
    model = QuantisedModel(place.checkpoint, quantiser("rtn"))
    windows = model.windows(place.texts, tokens=300)
    for count in (1, 3):
        hot = statistics.top_experts(pooled, count)
        cold = table.losses[~hot].reshape(3, 4 - count, 4)
        for name, bits in (
            ("uniform", np.full(cold.shape[:2], 2)),
            ("plain, model optimum", optimal_bitwidths(cold, 2.0, scope="model")),
        ):
            every = np.zeros(pooled.shape, np.int64)
            every[~hot] = bits.ravel()
            rows = {(r["gpu_experts"], r["assignment"], r["mean_bits"]): r for r in found["rows"]}
            row = rows[count, name, 2.0]
            np.testing.assert_allclose(row["nats"], model.loss(windows, every), rtol=1e-5, atol=0)
            assert row["lowest_share"] == (bits == 1).mean()
    assert {line.partition(":")[0] for line in found["readings"]} == {f"at 2 bits (K = {count})" for count in (1, 3)}
    text = held_out(place, *options).out
    assert "K = 1, 3: the K most important experts of a layer at the stored precision." in text
    assert "K = 0: no expert on the GPU, all quantised; K = 1, 2 not tried (--gpu-experts)" in (
        held_out(place, "--mean-bits", "2", "--tokens", "50").out
    )


def test_equal_assignments_are_tried_once_and_shown_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from perfmodel.losses.record.language_model import QuantisedModel

    seen = []
    monkeypatch.setattr(QuantisedModel, "loss", lambda self, windows, bits: seen.append(bits.tobytes()) or 1.0)
    text = held_out(place, "--mean-bits", "1,2", "--tokens", "50").out
    lines = text[text.index("Held-out") :].splitlines()
    assert len(seen) == len(set(seen))
    shown = [line for line in lines if re.match(r"^0  [12] +\w+(, [\w:]+)* .*1\.000", line)]
    assert len([line for line in shown if line.startswith("0  1 ")]) == 1  # all experts at 1 bit, by every rule
    (same,) = [line for line in lines if line.startswith("the same as uniform at 1 bit: ")]
    assert same.count(";") == 4 * 5 - 1


def test_assignments_that_equal_one_at_another_mean_name_it(place: Place) -> None:
    """With one near-data expert, 2.5 bits are 2."""
    text = held_out(place, "--mean-bits", "2.5", "--gpu-experts", "3", "--tokens", "50").out
    assert "the same as uniform at 2 bits: plain, random at 2.5;" in text
    assert "uniform at 2.5 bits" not in text


def test_a_table_of_another_model_or_other_weights_is_told(place: Place, tmp_path: Path) -> None:
    rows, options = calibration(tmp_path / "rows.npz"), ("--mean-bits", "2", "--tokens", "50")
    build_losses(place.checkpoint, rows, tmp_path / "built.npz", method="rtn")
    arrays = dict(np.load(tmp_path / "built.npz"))
    info = json.loads(str(arrays["metadata"]))

    def answer(**changed: Any) -> Answer:
        np.savez(tmp_path / "changed.npz", **{**arrays, "metadata": np.array(json.dumps({**info, **changed}))})
        return held_out(place._replace(table=tmp_path / "changed.npz"), *options)

    assert "other weights" not in answer().out
    assert "'changed' was built from other weights than 'toy-moe' has" in answer(sha256={"checkpoint": "0" * 64}).out
    assert "'changed' is of 'other', the checkpoint is called 'toy-moe'" in answer(model="other", sha256={}).out
    for key in ("num_layers", "num_experts", "hidden_size", "expert_size"):
        check_refusal(answer(**{key: 4096}), f"{key} 4096", "'toy-moe' has")


def test_differences_have_no_negative_zero() -> None:
    assert [heldout.nats_words(nats) for nats in (-0.0004, 0.0, 0.0004, -0.0006)] == ["+0.000"] * 3 + ["-0.001"]


def test_few_parts_of_text_have_no_error(place: Place) -> None:
    """A standard error of one window or of four is none."""
    text = held_out(place, "--mean-bits", "2", "--tokens", "500").out
    rows = [line.split() for line in text.splitlines() if line.startswith("0  2 ") and "%" in line]
    assert rows
    assert {row[-1] for row in rows} == {"-"}
    assert "+- 0.000" not in text
    assert re.search(r"stored precision +0 +0 +0.0 % +\d\.\d{3} +- +- +- +-$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn", "group_size": 8},
        {"method": "rtn"},
        {"method": "gptq", "group_size": 8, "damping": 0.3, "order": "activation"},
    ],
)
def test_weights_are_those_of_the_table(place: Place, tmp_path: Path, options: dict[str, Any]) -> None:
    """Group size, damping and order of the table are those of the weights that text is tried with."""
    from perfmodel.losses.record.language_model import QuantisedModel, quantiser

    rows = calibration(tmp_path / "rows.npz")
    build_losses(place.checkpoint, rows, tmp_path / "built.npz", **options)
    given = ("--calibration", rows) * (options["method"] == "gptq")
    built = place._replace(table=tmp_path / "built.npz")
    found = held_out(built, *given, "--mean-bits", "2", "--tokens", "300", "--json").document["held_out"]
    arguments = {"group": options.get("group_size"), **{k: options[k] for k in ("damping", "order") if k in options}}
    model = QuantisedModel(
        place.checkpoint, quantiser(options["method"], Calibration.load(rows) if given else None, **arguments)
    )
    windows = model.windows(place.texts, tokens=300)
    (row,) = [row for row in found["rows"] if (row["assignment"], row["mean_bits"]) == ("uniform", 3.0)]
    np.testing.assert_allclose(row["nats"], model.loss(windows, np.full((3, 4), 3)), rtol=1e-5, atol=0)
    plain = QuantisedModel(place.checkpoint, quantiser("rtn"))
    differs = abs(row["nats"] - plain.loss(windows, np.full((3, 4), 3))) > 0.005
    assert differs == (options != {"method": "rtn"})
    assert found["group_size"] == options.get("group_size")
    assert not any("assumed" in note for note in found["notes"])
    words = f"quantised by {options['method']}, " + (
        "one scale a group of 8 columns" if "group_size" in options else "one scale a row"
    )
    assert words in held_out(built, *given, "--mean-bits", "2", "--tokens", "50").out


def test_a_table_by_gptq_is_tried_by_gptq_or_by_its_nearest_losses(place: Place, tmp_path: Path) -> None:
    rows = calibration(tmp_path / "rows.npz")
    build_losses(place.checkpoint, rows, tmp_path / "built.npz", bits=[1, 2, 3, 4], group_size=8)
    built = place._replace(table=tmp_path / "built.npz")
    options = ("--mean-bits", "2", "--tokens", "50")
    check_refusal(held_out(built, *options), "'built'", "by gptq", "--calibration FILE, or --method rtn")
    nearest = held_out(built, *options, "--method", "rtn", "--json").document
    losses = np.load(tmp_path / "built.npz")["losses_rtn"]
    (row,) = [r for r in nearest["held_out"]["rows"] if (r["assignment"], r["mean_bits"]) == ("uniform", 2.0)]
    np.testing.assert_allclose(row["summed_loss"], losses[..., 1].sum(), rtol=1e-12, atol=0)
    assert (nearest["held_out"]["method"], nearest["held_out"]["group_size"]) == ("rtn", 8)
    assert nearest["notes"][0] == "losses are those of rounding to nearest (losses_rtn of 'built')"
    # Without them there is nothing that rounding to nearest could be held against.
    arrays = {name: array for name, array in np.load(tmp_path / "built.npz").items() if name != "losses_rtn"}
    np.savez(tmp_path / "bare.npz", **arrays)
    bare = place._replace(table=tmp_path / "bare.npz")
    check_refusal(held_out(bare, *options, "--method", "rtn"), "'bare'", "by gptq", "no losses_rtn")
    # A table of nearest losses is not one for GPTQ.
    build_losses(place.checkpoint, rows, tmp_path / "rtn.npz", method="rtn")
    rtn = place._replace(table=tmp_path / "rtn.npz")
    check_refusal(held_out(rtn, *options, "--method", "gptq", "--calibration", rows), "'rtn'", "allowed: rtn")
    check_refusal(held_out(rtn, *options, "--calibration", rows), "--calibration", "rounding to nearest")
    # Other rows than the table's, and folds, are said.
    other = calibration(tmp_path / "other.npz", seed=1)
    notes = held_out(built, *options, "--calibration", other, "--json").document["held_out"]["notes"]
    assert any("all folds but one" in note for note in notes)
    assert any("'other.npz' does not hold the rows" in note for note in notes)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"method": "rtn", "group_size": 1}, "group.size"),
        ({"method": "rtn", "group_size": "many"}, "group.size"),
        ({"method": "gptq", "damping": -1}, "damping"),
        ({"method": "gptq", "order": "random"}, "order"),
    ],
)
def test_metadata_that_no_build_writes_is_refused(info: dict[str, Any], words: str) -> None:
    table = LossTable(table_of(4).losses, name="odd", info=info)
    with pytest.raises(TraceError, match=f"loss table 'odd': metadata: {words}"):
        quantisation(table, calibrated=info["method"] == "gptq")


def test_a_method_that_is_not_known_is_named_as_assumed() -> None:
    table = LossTable(table_of(4).losses, name="odd", info={"method": "awq", "group_size": 64})
    found = quantisation(table, calibrated=False)
    assert (found.method, found.group_size) == ("rtn", 64)
    assert found.notes == (
        "loss table 'odd' names method 'awq', which cannot be done again; instead: rtn; summed and held-out losses are"
        " of different weights",
    )
    rows = quantisation(LossTable(table_of(4).losses, name="odd", info={"method": 3}), calibrated=True)
    assert "names method 3, which cannot be done again; instead: gptq, one scale a row, damping auto" in rows.notes[0]
    bare = LossTable(table_of(4).losses, name="bare", info={"group_size": None})
    assert "assumed: rtn; summed" in quantisation(bare, calibrated=False).notes[0]


def test_gptq_without_rows_is_refused_with_what_would_do() -> None:
    bare = LossTable(table_of(4).losses, name="bare")
    with pytest.raises(PerfModelError, match=r"^gptq was asked for \(--method\): .*; allowed: --calibration FILE$"):
        quantisation(bare, "gptq", calibrated=False)
    stated = LossTable(table_of(4).losses, name="stated", info={"method": "gptq"})
    with pytest.raises(PerfModelError, match=r"'stated' is of weights by gptq: .*; allowed: --calibration FILE$"):
        quantisation(stated, calibrated=False)
    with pytest.raises(PerfModelError, match=r"FILE, or --method rtn, as the file holds losses_rtn$"):
        quantisation(stated, calibrated=False, has_rtn=True)


def calibration(path: Path, seed: int = 0) -> Path:
    """Random rows for the small model."""
    import recorded

    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(recorded.LAYERS, 64, recorded.HIDDEN)).astype(np.float32)
    ids = np.argsort(rng.random((recorded.LAYERS, 64, recorded.EXPERTS)))[..., : recorded.TOP_K]
    Calibration(hidden, ids).save(path)
    return path


def test_gptq_needs_rows_of_this_model(place: Place, tmp_path: Path) -> None:
    options = ("--mean-bits", "2", "--tokens", "100")
    rows = calibration(tmp_path / "rows.npz")
    text = held_out(place, *options, "--calibration", rows).out
    assert "experts quantised by gptq, one scale a row, damping auto, natural order" in text
    assert "assumed: gptq, one scale a row, damping auto, natural order" in text
    (line,) = [line for line in text.splitlines() if "plain, model: optimum" in line and "%" in line]
    number = r" +[\d.]+"
    apart = r" +[+-]\d\.\d{3} +-"
    assert re.fullmatch(rf"0 +2 +plain, model: optimum{number * 3} %{number}{apart * 2}", line)
    given = Calibration.load(rows)
    Calibration(given.hidden[:2], given.expert_ids[:2]).save(tmp_path / "short.npz")
    check_refusal(held_out(place, *options, "--calibration", tmp_path / "short.npz"), "short.npz", "layers 2")


def test_what_does_not_fit_the_checkpoint_is_refused(place: Place, tmp_path: Path) -> None:
    model = strategies.plain_model(num_layers=2, moe_layers=(0, 1))
    strategies.small_trace(model, [(9, 9)]).save(tmp_path / "short.npz")
    other = place._replace(trace=tmp_path / "short.npz")
    check_refusal(held_out(other), "checkpoint 'toy-moe' has 3 layers x 4 experts", "'small' 2 x 4")
    check_refusal(held_out(place._replace(checkpoint=tmp_path / "none")), "none")
    check_refusal(held_out(place._replace(texts=[tmp_path / "none.txt"])), "none.txt")
    check_refusal(held_out(place, "--tokens", "1"), "tokens")
    check_refusal(held_out(place, "--tokens", "0"), "tokens")


def test_a_smaller_sum_is_not_a_better_model(shared: Path) -> None:
    """On the real small model, at 2 bits: one budget for the whole model halves the sum and makes a worse model."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = shared / "tiny-mixtral"
    answer = run(
        *("losses", "compare", folder / "loss_table.npz", "--trace", folder / "tiny-mixtral-32l.npz"),
        *("--gpu-experts", "0", "--mean-bits", "2", "--checkpoint", folder / "model"),
        *("--text", ROOT / "LICENSE", "--tokens", "1024", "--method", "rtn", "--json"),
    )
    found = answer.document["held_out"]
    rows = {(row["assignment"], row["mean_bits"]): row for row in found["rows"]}
    uniform = [rows["uniform", float(width)]["nats"] for width in (4, 3, 2, 1)]
    assert uniform == sorted(uniform)
    whole = rows["plain, model optimum", 2.0]
    assert rows["uniform", 2.0]["summed_loss"] / whole["summed_loss"] > 2
    assert whole["over_uniform"]["nats"] > 0.1
    assert "the smallest summed loss, plain, model: optimum, gives +" in found["readings"][1]


# --- the page ---

PAGE = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
SHOWN = PAGE[PAGE.index("## What a table shows") : PAGE.index("## Sources")]


def test_commands_on_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [line for block in re.findall(r"```sh\n(.*?)```", SHOWN, re.DOTALL) for line in block.splitlines()]
    assert len(commands) == 2
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "perfmodel"
        answer = run(*arguments)
        assert answer.code == 0, answer.err
        assert (tmp_path / arguments[arguments.index("--plot") + 1]).exists()


def test_table_on_the_page(mini: Comparison) -> None:
    rows = re.findall(r"^\| (\d), (\d) \| (\w+) \| (.*) \|$", SHOWN, flags=re.MULTILINE)
    assert len(rows) == 8
    for count, mean, objective, cells in rows:
        found = mini.setting(int(count), float(mean), objective).assignments
        ratios = [found[rule].ratio for rule in ("uniform", "random", "prefix", "model optimum")]
        decode = [found[rule].decode_vs_uniform for rule in ("random", "prefix", "optimum", "model optimum")]
        assert cells.split(" | ") == [f"{value:.3f}" for value in (*ratios, *decode)]
    least = [mini.setting(0, mean, "plain").hindsight for mean in (2.0, 3.0)]
    assert f"could reach {least[0]:.3f} at 2 bits and {least[1]:.3f} at 3" in " ".join(SHOWN.split())


def test_conclusions_on_the_page(mini: Comparison) -> None:
    def decode(count: int, mean: float, objective: str, rule: str) -> float:
        value = mini.setting(count, mean, objective).assignments[rule].decode_vs_uniform
        assert value is not None
        return value

    for count in mini.gpu_experts:
        assert ratio(mini, count, 2.0, "plain", "prefix") > ratio(mini, count, 2.0, "plain", "random") - 0.005
        assert ratio(mini, count, 3.0, "plain", "uniform") < 1.0005
        assert decode(count, 2.0, "plain", "prefix") < decode(count, 2.0, "plain", "random") - 0.05
        assert 1 / ratio(mini, count, 2.0, "plain", "model optimum") == pytest.approx(2.1, abs=0.1)
        for objective in ("importance", "use"):
            assert ratio(mini, count, 2.0, objective, "prefix") < 1.03
            assert decode(count, 2.0, objective, "prefix") < decode(count, 2.0, "plain", "prefix")
            assert decode(count, 3.0, objective, "prefix") > 1.01


def test_measured_sums_on_the_page(shared: Path) -> None:
    """Summed losses by assignment; the held-out losses beside them take minutes and are not measured again here."""
    folder = shared / "tiny-mixtral"
    trace, table = RoutingTrace.load(folder / "tiny-mixtral-32l.npz"), LossTable.load(folder / "loss_table.npz")
    pooled = placement.importance(trace).values.mean(axis=0)
    rows = re.findall(r"^\| (\w+(?:: [\w ]+)?) \| (\d\.\d\d) \| (\d+ %) \|", SHOWN, flags=re.MULTILINE)
    assert len(rows) == 8
    scopes: dict[str, Any] = {"optimum": "layer", "whole model": "model"}
    for name, shown, share in rows:
        objective, _, rule = name.partition(": ")
        weights = {"importance": pooled, "variance": 1 / table.output_variance}.get(objective)
        if name == "uniform":
            bits = np.full(pooled.shape, 2)
        elif rule == "importance order":
            bits = select_bitwidths(pooled, table.losses, 2, weights=weights)
        else:
            bits = optimal_bitwidths(table.losses, 2, weights=weights, scope=scopes[rule])
        found = np.take_along_axis(table.losses, bits[..., None].astype(int) - 1, axis=-1).sum()
        assert (shown, share) == (f"{found:.2f}", f"{100 * (bits == 1).mean():.0f} %"), name
