"""What policies decide, against plain loops; and how their text is read."""

import dataclasses
import itertools
import math
import re
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from strategies import (
    EVERY_POLICY,
    NDP_SYSTEM,
    PLACED,
    decode_rows,
    mixtral,
    models,
    plain_model,
    policy_texts,
    recording,
    small_trace,
    systems,
    traces,
    without_chance,
)

from perfmodel import placement
from perfmodel.bitwidth import LossTable, optimal_bitwidths, select_bitwidths
from perfmodel.errors import PolicyError, TraceError
from perfmodel.hardware import Limits, load_spec, load_system
from perfmodel.point import dram_efficiency
from perfmodel.policies import (
    ABLATIONS,
    POLICIES,
    ContextAware,
    Executor,
    Hobbit,
    Monde,
    Policy,
    Static,
    When,
    parse_policy,
)
from perfmodel.routing import RoutingTrace
from perfmodel.run import Run, evaluate, make_replay, plan_run
from perfmodel.scenario import Scenario
from perfmodel.sweeps.api import sweep

GPU, FETCH, NDP, SKIP = Executor.GPU, Executor.FETCH, Executor.NDP, Executor.SKIP


def decided(run: Run, sequence: int) -> list[list[list[Any]]]:
    """Work class of every pick of one sequence [T][L][k]."""
    start, stop = run.plan.offsets[sequence : sequence + 2]
    return [[[run.plan.classes[c] for c in layer] for layer in step] for step in run.plan.picks[start:stop].tolist()]


def executors(run: Run) -> np.ndarray:
    """Executor of every pick [T, L, k]."""
    return np.array([work.executor for work in run.plan.classes])[run.plan.picks]


# --- context-aware and static ---


def expected_use(trace: RoutingTrace, name: str) -> np.ndarray:
    """Selections that an objective of ``use`` weighs by [S, L, E]: the own prompt's, or those of the others' decode."""
    own = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts))
    for s in range(trace.num_sequences):
        rows = trace.prefill_slice(s) if name == "context-aware" else trace.decode_slice(s)
        for expert in range(trace.num_experts):
            own[s, :, expert] = (trace.topk_ids[rows] == expert).sum(axis=(0, 2))
    return (
        own if name == "context-aware" else np.array([np.delete(own, s, axis=0).sum(axis=0) for s in range(len(own))])
    )


@given(st.data(), st.sampled_from(PLACED))
def test_experts_run_where_they_are_placed(data, name) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2 if name == "static" else 1, prefill=True))
    text = data.draw(policy_texts(model, [name]))
    run = plan_run(model, NDP_SYSTEM, trace, text)
    policy, full = run.policy, model.expert_bits
    assert isinstance(policy, ContextAware | Static)
    options: dict[str, Any] = {"alpha": policy.alpha, "norm": policy.norm}
    if name == "static":
        values = placement.importance_of_others(run.replay, **options).values
    else:
        values = placement.importance(trace, **options).values
    menu = tuple(range(policy.min_bits, 5))
    losses = LossTable.load("tiny-mixtral-32l-losses").for_model(trace.num_layers, model.num_experts, assume=True)
    for s in range(trace.num_sequences):
        ids, assigned, _ = decode_rows(trace, s)
        picks = decided(run, s)
        ranked = [
            sorted(range(model.num_experts), key=lambda e: (-values[s, layer, e], e))
            for layer in range(trace.num_layers)
        ]
        colds = np.array([[e for e in one if e not in one[: policy.gpu_experts]] for one in ranked], dtype=np.int64)
        if policy.selector == "full":
            chosen = np.full(colds.shape, full)
        elif policy.selector == "uniform":
            chosen = np.full(colds.shape, policy.mean_bits)
        else:
            layers = np.arange(trace.num_layers)[:, None]
            how: dict[str, Any] = {"bits": menu, "scope": policy.scope, "budget": policy.budget}
            how["weights"] = {
                "plain": None,
                "importance": values[s][layers, colds],
                "use": expected_use(trace, name)[s][layers, colds],
            }[policy.objective]
            table = losses.only(menu).losses[layers, colds]
            if policy.selector == "optimum":
                chosen = optimal_bitwidths(table, policy.mean_bits, **how)
            else:
                chosen = select_bitwidths(values[s][layers, colds], table, policy.mean_bits, **how)
        for layer in range(trace.num_layers):
            hot = set(ranked[layer][: policy.gpu_experts])
            bits = dict(zip(colds[layer].tolist(), chosen[layer].tolist(), strict=True))
            for t, j in itertools.product(range(len(ids)), range(trace.top_k)):
                work, expert = picks[t][layer][j], ids[t, layer, j]
                if not assigned[t, layer, j]:
                    assert work.executor == SKIP
                elif expert in hot:
                    assert (work.executor, work.bits, work.quantised) == (GPU, full, False)
                else:
                    assert (work.executor, work.bits, work.quantised) == (NDP, bits[expert], bits[expert] < full)
                assert work.when == When.NOW
    assert run.plan.overlap == policy.overlap
    moved = policy.gpu_experts * trace.num_layers if name == "context-aware" else 0
    assert run.plan.migrated_experts.tolist() == [moved] * trace.num_sequences


@pytest.mark.parametrize("bits", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_bits_of_the_near_data_experts_meet_their_mean(bits: float) -> None:
    model = plain_model(num_experts=8)
    trace = small_trace(model, [(20, 4), (30, 4)], seed=6)
    ids = trace.topk_ids.copy()
    for s in range(2):
        # Four steps of two picks go once through all experts.
        ids[trace.decode_slice(s)] = np.arange(8, dtype=ids.dtype).reshape(4, 1, 2)
    run = plan_run(
        model, NDP_SYSTEM, dataclasses.replace(trace, topk_ids=ids), ContextAware(mean_bits=bits, gpu_experts=4)
    )
    for s in range(2):
        picks = np.array([[[work.bits for work in layer] for layer in step] for step in decided(run, s)])
        every = picks.transpose(1, 0, 2).reshape(3, 8)
        assert (every == 16).sum(axis=1).tolist() == [4, 4, 4]
        assert (np.where(every == 16, 0, every).sum(axis=1) == 4 * bits).all()


class Options(NamedTuple):
    """Options of the bit budget, and the loss table that they meet."""

    table: LossTable
    mean_bits: float
    selector: str
    objective: str
    scope: str
    min_bits: int
    budget: str


@st.composite
def budgets(draw: st.DrawFn, layers: int, experts: int) -> Options:
    """Any options with losses that may tie, rise with bits, or be zero, at menus with and without gaps."""
    widths = draw(st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4), (2, 4), (1, 3, 8)]))
    numbers = st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0, 3.5, 8.0])
    losses = np.array(draw(st.lists(numbers, min_size=(n := layers * experts * len(widths)), max_size=n)))
    variance = draw(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=layers * experts, max_size=layers * experts))
    mean = draw(st.sampled_from([1, 1.5, 2, 7 / 3, 2.5, 3, 3.25, 4]))
    return Options(
        LossTable(
            losses.reshape(layers, experts, -1),
            "mine",
            bits=widths,
            output_variance=np.array(variance).reshape(layers, experts),
        ),
        mean,
        draw(st.sampled_from(["prefix", "optimum"])),
        draw(st.sampled_from(["plain", "importance", "use", "variance"])),
        draw(st.sampled_from(["layer", "model"])),
        draw(st.integers(1, int(mean))),
        draw(st.sampled_from(["exact", "at-most"])),
    )


def smallest_total(options: Options, losses: np.ndarray, menu: tuple[int, ...]) -> float:
    """Least weighted loss that the budget allows, over every assignment; infinite where it allows none.

    losses : [layers, experts, widths], weighted, experts by falling importance.
    """
    experts = losses.shape[1]
    by_cost: list[dict[int, float]] = []
    for table in losses:
        found: dict[int, float] = {}
        for levels in itertools.product(range(len(menu)), repeat=experts):
            if options.selector == "prefix" and any(a < b for a, b in itertools.pairwise(levels)):
                continue
            cost = sum(menu[level] - menu[0] for level in levels)
            total = sum(float(table[e, level]) for e, level in enumerate(levels))
            found[cost] = min(found.get(cost, math.inf), total)
        by_cost.append(found)

    def within(group: list[dict[int, float]]) -> float:
        room = math.floor(len(group) * experts * (options.mean_bits - menu[0]) + 1e-9)
        totals = [
            sum(found[cost] for found, cost in zip(group, costs, strict=True))
            for costs in itertools.product(*group)
            if (sum(costs) <= room if options.budget == "at-most" else sum(costs) == room)
        ]
        return min(totals, default=math.inf)

    return within(by_cost) if options.scope == "model" else sum(within([found]) for found in by_cost)


@settings(max_examples=150)
@given(st.data(), st.sampled_from(PLACED), st.integers(0, 2))
def test_no_other_bits_within_the_budget_lose_less(data, name, gpu_experts) -> None:
    model = plain_model(num_experts=4, num_layers=2)
    trace = small_trace(model, [(9, 4), (3, 4)], seed=data.draw(st.integers(0, 99)))
    ids = trace.topk_ids.copy()
    for s in range(2):
        # Decode picks every expert, so that its bits can be read from the plan.
        ids[trace.decode_slice(s)] = np.array([[0, 1], [2, 3], [0, 2], [1, 3]], dtype=ids.dtype)[:, None]
    trace = dataclasses.replace(trace, topk_ids=ids)
    options = data.draw(budgets(2, 4))
    rule = POLICIES[name](gpu_experts=gpu_experts, **{k: v for k, v in options._asdict().items() if k != "table"})
    menu = tuple(width for width in options.table.bits if options.min_bits <= width <= 4)
    values = (
        placement.importance(trace).values
        if name == "context-aware"
        else placement.importance_of_others(make_replay(model, trace)).values
    )
    variance = options.table.output_variance
    assert variance is not None
    weight = {
        "plain": np.ones_like(values),
        "importance": values,
        "use": expected_use(trace, name),
        "variance": np.broadcast_to(1 / np.where(variance > 0, variance, np.inf), values.shape),
    }[options.objective]
    order = np.argsort(-values, axis=-1, kind="stable")[..., gpu_experts:]
    layers = np.arange(2)[:, None]
    kept = [options.table.bits.index(width) for width in menu]
    weighted = [
        options.table.losses[layers, order[s]][..., kept] * weight[s][layers, order[s]][..., None] for s in (0, 1)
    ]
    within_menu = bool(menu) and menu[0] <= options.mean_bits <= menu[-1]
    least = [smallest_total(options, one, menu) for one in weighted] if within_menu else [math.inf]
    if math.isinf(sum(least)):
        with pytest.raises(PolicyError, match="mean_bits" if menu else "widths of loss table mine"):
            plan_run(model, NDP_SYSTEM, trace, rule, losses=options.table)
        return
    run = plan_run(model, NDP_SYSTEM, trace, rule, losses=options.table)
    assert run.plan.replica_bits == menu
    bits = np.zeros((2, 2, 4))
    for s in range(2):
        rows, _, _ = decode_rows(trace, s)
        for t, layer, j in np.ndindex(rows.shape):
            bits[s, layer, rows[t, layer, j]] = decided(run, s)[t][layer][j].bits
        level = np.searchsorted(menu, bits[s][layers, order[s]])
        total = np.take_along_axis(weighted[s], level[..., None], axis=-1).sum()
        assert_allclose(total, least[s], rtol=1e-12, atol=0)


def test_the_first_widths_and_floors_of_the_budget() -> None:
    model = plain_model(num_experts=4)
    trace = small_trace(model, [(9, 6), (5, 4)], seed=3)
    wide = LossTable(np.ones((3, 4, 2)), "wide", bits=(8, 16))
    few = LossTable(np.ones((3, 4, 2)), "few", bits=(2, 4))
    narrow = LossTable(np.ones((3, 4, 2)), "narrow", bits=(1, 2))
    for losses, text, words in (
        (None, "mean_bits=2,min_bits=3", r"option mean_bits: found 2(\.0)?, allowed 3 to 4 with min_bits=3"),
        (None, "min_bits=0", "option min_bits: found 0, allowed 1 to 4"),
        (None, "min_bits=2.5", "option min_bits: found '2.5', allowed 1 to 4"),
        (None, "objective=loss", r"allowed plain \| importance \| use \| variance"),
        (None, "scope=layers", r"allowed layer \| model"),
        (None, "budget=most", r"allowed exact \| at-most"),
        (
            wide,
            "mean_bits=3",
            "^policy context-aware: the widths of loss table wide are 8, 16, above the 4 bits that near-data experts",
        ),
        (narrow, "mean_bits=3,min_bits=3", "loss table narrow are 1, 2, allowed: at least one from min_bits=3 to 4"),
        (few, "mean_bits=1.5", r"option mean_bits: found 1.5, allowed 2 to 4; .*loss table few.*: 2, 4"),
        (few, "mean_bits=2.5,gpu_experts=1", r"cannot meet exactly at 2, 4 bits.*: 2 and 2.6666.*at-most"),
        (few, "objective=variance", "objective: found variance, allowed plain, importance or use.*few"),
    ):
        with pytest.raises(PolicyError, match=words) as error:
            plan_run(model, NDP_SYSTEM, trace, f"context-aware:{text}", losses=losses)
        assert "\n" not in str(error.value)
    # Where no width is searched for, the table does not matter.
    for text, kept in (
        ("selector=full,mean_bits=1,min_bits=4", ()),
        ("selector=uniform,min_bits=2", (2.0, 3.0, 4.0)),
        ("gpu_experts=4,min_bits=3", (3.0, 4.0)),
    ):
        assert plan_run(model, NDP_SYSTEM, trace, f"context-aware:{text}", losses=wide).plan.replica_bits == kept


def test_a_floor_saves_the_memory_of_the_replicas_below_it() -> None:
    kept = [
        evaluate(mixtral(), "h100-cxl2-ndp", recording(), f"context-aware:min_bits={bits}", output=2).memory_bytes[
            "ndp"
        ]["replicas"]
        for bits in (1, 2, 3)
    ]
    assert_allclose(np.array(kept) * 8 / 32 / 8 / mixtral().expert_params, [10, 9, 7], rtol=1e-12, atol=0)


def test_bit_options_are_axes() -> None:
    found = sweep(
        policy=["context-aware", "static"],
        axes={"policy.objective": ["plain", "importance"], "min_bits": [1, 2, 4], "scope": "layer,model"},
        metrics=["tpot_mean_s", "quant_loss"],
        prompt=8,
        output=8,
    )
    assert found.sizes == {"policy": 2, "policy.objective": 2, "policy.min_bits": 3, "policy.scope": 2}
    place = {"policy": "static", "policy.objective": "importance", "policy.min_bits": 2, "policy.scope": "model"}
    one = found.sel(place)
    alone = Scenario.of(policy="static:objective=importance,min_bits=2,scope=model", prompt=8, output=8).run(0).price()
    assert (one.tpot_mean_s.item(), one.quant_loss.item()) == (alone.tpot_mean_s, alone.quant_loss)
    assert np.isnan(found.quant_loss.sel({"policy.min_bits": 4})).all()  # the mean of 3 bits is below that floor
    assert "min_bits=4" in found.attrs["infeasible"]


def test_a_given_loss_table_is_used_and_must_fit() -> None:
    model = plain_model(num_experts=4)
    trace = small_trace(model, [(9, 6)], seed=3)
    # Only expert 0 gains from bits, then only expert 3.
    for expert in (0, 3):
        losses = np.full((3, 4, 4), 1.0)
        losses[:, expert] = [8.0, 4.0, 2.0, 1.0]
        values = placement.importance(trace).values[0]
        run = plan_run(
            model, NDP_SYSTEM, trace, "context-aware:gpu_experts=0,mean_bits=1.75", losses=LossTable(losses, "mine")
        )
        ids, _, _ = decode_rows(trace, 0)
        picks = decided(run, 0)
        for t, layer, j in np.ndindex(ids.shape):
            expected = select_bitwidths(values[layer], losses[layer], 1.75)[ids[t, layer, j]]
            assert picks[t][layer][j].bits == expected
        assert any("losses: mine" in note for note in run.plan.notes)
    wrong = LossTable(np.ones((3, 5, 4)), "mine")
    with pytest.raises(TraceError, match="5 experts"):
        plan_run(model, NDP_SYSTEM, trace, "context-aware:gpu_experts=0", losses=wrong)


def test_ablations_are_options_of_the_context_aware_policy() -> None:
    for options in ABLATIONS.values():
        assert parse_policy(f"context-aware:{options}") != ContextAware()


# --- MoNDE ---


class PlainLru:
    """The last few experts."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.entries = capacity, OrderedDict()

    def has(self, expert: int) -> bool:
        """Whether the expert is here; if so it becomes the newest."""
        if expert in self.entries:
            self.entries.move_to_end(expert)
        return expert in self.entries

    def put(self, expert: int) -> None:
        """Take an expert in, the oldest one out."""
        self.entries[expert] = None
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


def ranked_picks(assigned: np.ndarray, weights: np.ndarray | None) -> list[int]:
    """Assigned picks of one token and layer, best weight first; without weights in their order."""
    picks = [j for j in range(len(assigned)) if assigned[j]]
    return picks if weights is None else sorted(picks, key=lambda j: (-float(weights[j]), j))


@given(st.data())
def test_monde_copies_the_best_pick_and_keeps_the_last_ones(data) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model))
    resident = data.draw(st.integers(0, model.num_experts))
    run = plan_run(model, NDP_SYSTEM, trace, Monde(resident=resident))
    for s in range(trace.num_sequences):
        ids, assigned, weights = decode_rows(trace, s)
        picks = decided(run, s)
        for layer in range(trace.num_layers):
            cache = PlainLru(resident)
            for t in range(len(ids)):
                ranked = ranked_picks(assigned[t, layer], None if weights is None else weights[t, layer])
                expected = [SKIP if not there else NDP for there in assigned[t, layer]]
                if ranked:
                    expert = int(ids[t, layer, ranked[0]])
                    hit = cache.has(expert)
                    expected[ranked[0]] = GPU if hit else FETCH
                    if not hit:
                        cache.put(expert)
                assert [work.executor for work in picks[t][layer]] == expected
                assert all(work.bits == model.expert_bits and not work.quantised for work in picks[t][layer])


@given(st.data(), st.sampled_from(["nearest", "floor", "ceil"]))
def test_monde_balances_by_its_rule(data, rounding) -> None:
    model, system = data.draw(models()), data.draw(systems())
    trace = data.draw(traces(model))
    run = plan_run(model, system, trace, Monde(reading="balance", rounding=rounding))
    assert system.ndp is not None
    link = system.link.bandwidth_gb_per_s * system.link.efficiency
    near = system.ndp.dram_bandwidth_gb_per_s * dram_efficiency(system.ndp)
    for s in range(trace.num_sequences):
        ids, assigned, weights = decode_rows(trace, s)
        picks = decided(run, s)
        for t, layer in np.ndindex(ids.shape[:2]):
            ranked = ranked_picks(assigned[t, layer], None if weights is None else weights[t, layer])
            share = len(ranked) * link / (link + near)
            if abs(share * 2 - round(share * 2)) < 1e-9:
                continue  # on the edge of rounding
            count = {"nearest": round(share), "floor": math.floor(share), "ceil": math.ceil(share)}[rounding]
            copied = [j for j in range(trace.top_k) if picks[t][layer][j].executor == FETCH]
            assert copied == sorted(ranked[:count])
            others = {j for j in range(trace.top_k) if picks[t][layer][j].executor == NDP}
            assert others == set(ranked[count:])


def test_monde_readings_on_the_published_machine() -> None:
    model = mixtral("mixtral-8x22b")
    options = {"prompt": 128, "output": 128, "layers": "cycle"}

    def layer_ms(text: str, system: str) -> float:
        parts = evaluate(model, system, recording(), text, **options).breakdown_s
        return 1e3 * (parts["experts_gpu"] + parts["link"] + parts["ndp"]) / 56

    for system in ("h100-cxl-ndp", "h100-cxl2-ndp"):
        # 2 * 25.5 / (25.5 + 207) = 0.22 and 2 * 59.3 / (59.3 + 207) = 0.45 experts: none of the two.
        balance = plan_run(model, system, recording(), "monde:reading=balance", **options)
        assert (executors(balance) == NDP).all()
        assert_allclose(layer_ms("monde:reading=balance", system), 5.84, rtol=0.01)
        up = plan_run(model, system, recording(), "monde:reading=balance,rounding=ceil", **options)
        assert ((executors(up) == FETCH).sum(axis=-1) == 1).all()
    one = plan_run(model, "h100-cxl2-ndp", recording(), "monde", **options)
    assert ((executors(one) == FETCH).sum(axis=-1) == 1).all()
    assert ((executors(one) == NDP).sum(axis=-1) == 1).all()
    # 604 MB at 59.29 GB/s, then read at 0.32 of 3350 GB/s; the other pick is hidden behind it.
    assert_allclose(layer_ms("monde", "h100-cxl2-ndp"), 604e6 / 59.29e6 + 604e6 / 0.32 / 3350e6, rtol=2e-3)
    assert_allclose(layer_ms("monde", "h100-cxl2-ndp"), 10.4, rtol=0.05)


@pytest.mark.parametrize("mode", ["ndp", "fetch", "balanced"])
def test_prefill_modes(mode: str) -> None:
    model = plain_model(num_experts=6, top_k=2)
    trace = small_trace(model, [(7, 2), (1, 3)], seed=2, unassigned=0.2)
    system = NDP_SYSTEM.with_values({"link.bandwidth_gb_per_s": 200, "link.efficiency": 1, "ndp.dram_efficiency": 0.5})
    for text in (f"monde:prefill={mode}", f"context-aware:gpu_experts=2,prefill={mode}"):
        plan = plan_run(model, system, trace, text).plan
        assert plan.prefill_tokens is not None
        assert plan.prefill_class is not None
        for s, layer in np.ndindex(plan.prefill_tokens.shape[:2]):
            ids = trace.topk_ids[trace.prefill_slice(s), layer]
            counts = [int((ids == e).sum()) for e in range(6)]
            assert plan.prefill_tokens[s, layer].tolist() == counts
            active = sorted((e for e in range(6) if counts[e]), key=lambda e: (-counts[e], e))
            share = {"ndp": 0, "fetch": len(active), "balanced": round(len(active) * 200 / (200 + 256))}[mode]
            for rank, expert in enumerate(active):
                work = plan.classes[plan.prefill_class[s, layer, expert]]
                assert work == ((FETCH if rank < share else NDP), 16.0, False, When.NOW)


def test_a_static_placement_is_there_before_the_prompt() -> None:
    model = plain_model(num_experts=6)
    trace = small_trace(model, [(7, 4), (6, 3), (2, 3)], seed=4)
    system = NDP_SYSTEM.with_values({"link.bandwidth_gb_per_s": 200, "link.efficiency": 1, "ndp.dram_efficiency": 0.5})
    for mode in ("ndp", "fetch", "balanced"):
        plan = plan_run(model, system, trace, f"static:gpu_experts=3,prefill={mode}").plan
        assert plan.hot is not None
        assert plan.prefill_class is not None
        assert plan.prefill_tokens is not None
        kinds = np.array([work.executor for work in plan.classes])[plan.prefill_class]
        assert_array_equal(kinds == GPU, plan.hot)
        assert (plan.migrated_experts == 0).all()
        for s, layer in np.ndindex(plan.hot.shape[:2]):
            tokens = plan.prefill_tokens[s, layer]
            cold = [e for e in range(6) if tokens[e] and not plan.hot[s, layer, e]]
            share = {"ndp": 0, "fetch": len(cold), "balanced": round(len(cold) * 200 / (200 + 256))}[mode]
            ranked = sorted(cold, key=lambda e: (-tokens[e], e))
            for rank, expert in enumerate(ranked):
                assert kinds[s, layer, expert] == (FETCH if rank < share else NDP)


# --- HOBBIT ---


def plain_s(assigned: np.ndarray, weights: np.ndarray | None) -> dict[int, float]:
    """Sum of the normalised weights of the better-ranked picks, for every assigned pick."""
    every = np.arange(len(assigned), 0, -1.0) if weights is None else weights.astype(np.float64)
    ranked = ranked_picks(assigned, every)
    total = sum(every[j] for j in sorted(ranked))
    found, running = {}, 0.0
    for j in ranked:
        found[j] = running
        running += every[j] / total if total else 0.0
    return found


@st.composite
def hobbit_runs(draw: st.DrawFn, **fixed: Any) -> Run:
    """HOBBIT with random options on a random model and trace."""
    model = draw(models())
    trace = draw(traces(model))
    policy = dataclasses.replace(parse_policy(draw(policy_texts(model, ["hobbit"]))), **fixed)
    if trace.topk_weights is None:
        policy = dataclasses.replace(policy, split="published")
    return plan_run(model, NDP_SYSTEM, trace, policy)


def outcomes(run: Run, wanted: list[dict[tuple[int, int, int], str]]) -> None:
    """Check every decided pick against plain caches and the precision each pick wants."""
    policy, model, trace = run.policy, run.model, run.replay.trace
    assert isinstance(policy, Hobbit)
    full, low = model.expert_bits, min(policy.low_bits, model.expert_bits)
    for s in range(trace.num_sequences):
        ids, assigned, _ = decode_rows(trace, s)
        picks = decided(run, s)
        for layer in range(trace.num_layers):
            high_cache, low_cache = PlainLru(policy.cache_high), PlainLru(policy.cache_low)
            for t, j in itertools.product(range(len(ids)), range(trace.top_k)):
                work, expert = picks[t][layer][j], int(ids[t, layer, j])
                found = (work.executor, work.bits)
                if not assigned[t, layer, j]:
                    assert work.executor == SKIP
                    continue
                want = wanted[s][t, layer, j]
                if high_cache.has(expert):
                    assert found == (GPU, full)
                elif want != "high" and low_cache.has(expert):
                    assert found == (GPU, low)
                elif want == "high":
                    assert found == (FETCH, full)
                    high_cache.put(expert)
                elif want == "low":
                    assert found == (FETCH, low)
                    low_cache.put(expert)
                else:
                    assert work.executor == SKIP
                assert not work.quantised


@given(st.data())
def test_hobbit_gates_are_thresholds_on_the_weights(data) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model).filter(lambda t: t.topk_weights is not None))
    policy = dataclasses.replace(
        parse_policy(data.draw(policy_texts(model, ["hobbit"]))), split="gates", prefetch_accuracy=0.0
    )
    assert isinstance(policy, Hobbit)
    run = plan_run(model, NDP_SYSTEM, trace, policy)
    wanted = []
    for s in range(trace.num_sequences):
        ids, assigned, weights = decode_rows(trace, s)
        wanted.append({})
        for t, layer in np.ndindex(ids.shape[:2]):
            assert weights is not None
            for j, value in plain_s(assigned[t, layer], weights[t, layer]).items():
                name = "high" if value <= policy.t1 else "low" if value <= policy.t2 else "skip"
                wanted[s][t, layer, j] = name
    outcomes(run, wanted)


def without_caches(run: Run) -> list[dict[tuple[int, int, int], str]]:
    """Precision each pick of a plan without caches is copied at."""
    full = run.model.expert_bits
    return [
        {
            (t, layer, j): "skip" if w.executor == SKIP else "high" if w.bits == full else "low"
            for t, step in enumerate(decided(run, s))
            for layer, picks in enumerate(step)
            for j, w in enumerate(picks)
        }
        for s in range(run.replay.trace.num_sequences)
    ]


@given(hobbit_runs(split="published", low_bits=2.0, prefetch_accuracy=0.0))
def test_hobbit_caches_serve_what_plain_caches_serve(run: Run) -> None:
    bare = dataclasses.replace(run.policy, cache_high=0, cache_low=0)
    outcomes(run, without_caches(plan_run(run.model, run.system, run.replay, bare)))


@given(hobbit_runs(split="published", low_bits=2.0, cache_high=0, cache_low=0))
def test_hobbit_published_shares_hold_in_every_sequence(run: Run) -> None:
    trace = run.replay.trace
    wanted = without_caches(run)
    for s in range(trace.num_sequences):
        ids, assigned, weights = decode_rows(trace, s)
        by_name: dict[str, list[float]] = {"high": [], "low": [], "skip": []}
        for t, layer in np.ndindex(ids.shape[:2]):
            for j, value in plain_s(assigned[t, layer], None if weights is None else weights[t, layer]).items():
                by_name[wanted[s][t, layer, j]].append(value)
        count = int(assigned.sum())
        high, low, skip = (len(by_name[name]) for name in ("high", "low", "skip"))
        assert high + low + skip == count
        assert abs(high - 0.67 * count) <= 0.5 + 1e-9
        assert abs(high + low - 0.97 * count) <= 0.5 + 1e-9
        # The smallest s are copied at high precision, the largest skipped.
        for better, worse in (("high", "low"), ("low", "skip"), ("high", "skip")):
            if by_name[better] and by_name[worse]:
                assert max(by_name[better]) <= min(by_name[worse]) + 1e-9


def test_hobbit_spreads_ties_over_a_sequence() -> None:
    model = plain_model(top_k=2, num_layers=1)
    bare = small_trace(model, [(1, 300)], weights=False)
    run = plan_run(model, NDP_SYSTEM, bare, "hobbit")
    # Without weights the first pick is high, and of the second picks 34 % are: in every stretch of the sequence.
    low = without_caches(run)[0]
    for start in range(0, 300, 50):
        names = [low[t, 0, 1] for t in range(start, start + 50)]
        assert 0.25 <= names.count("high") / 50 <= 0.43
        assert names.count("skip") <= 5
    assert all(low[t, 0, 0] == "high" for t in range(300))


@given(hobbit_runs(cache_high=0, cache_low=0))
def test_hobbit_prefetch(run: Run) -> None:
    policy = run.policy
    assert isinstance(policy, Hobbit)
    plain = plan_run(run.model, run.system, run.replay, dataclasses.replace(policy, prefetch_accuracy=0.0))
    foretold = executors(run) == FETCH
    assert plain.plan.copies is None
    for s in range(run.replay.trace.num_sequences):
        for step, step_without in zip(decided(run, s), decided(plain, s), strict=True):
            for layer, (picks, picks_without) in enumerate(zip(step, step_without, strict=True)):
                for work, without in zip(picks, picks_without, strict=True):
                    # Without caches prefetch changes when a copy is issued, and nothing else.
                    assert work[:3] == without[:3]
                    assert without.when == When.NOW
                    if work.executor == FETCH and layer > 0 and policy.prefetch_accuracy in (0, 1):
                        assert work.when == (When.AHEAD if policy.prefetch_accuracy else When.NOW)
    classes = np.array([work.when == When.AHEAD for work in run.plan.classes])
    late = foretold & ~classes[run.plan.picks]
    late[:, 0] = False
    wrong = 0 if run.plan.copies is None else classes[run.plan.copies].sum(axis=2)
    # A pick that comes late was foretold wrongly: another expert was copied, if there is one that the step leaves.
    assert (wrong <= late.sum(axis=2)).all()
    if run.model.num_experts >= 2 * run.model.top_k:
        assert_array_equal(wrong + np.zeros(late.shape[:2], int), late.sum(axis=2) * (policy.prefetch_accuracy > 0))


def test_hobbit_copies_ahead_as_often_as_it_foretells_rightly() -> None:
    plan = plan_run(mixtral(), NDP_SYSTEM, recording(), "hobbit:prefetch_accuracy=0.96").plan
    ahead = np.array([work.executor == FETCH and work.when == When.AHEAD for work in plan.classes])[plan.picks[:, 1:]]
    fetched = np.array([work.executor == FETCH for work in plan.classes])[plan.picks[:, 1:]]
    assert_allclose(ahead.sum() / fetched.sum(), 0.96, atol=0.003, rtol=0)


def test_hobbit_prefill_copies_every_selected_expert() -> None:
    model = plain_model(num_experts=6)
    plan = plan_run(model, load_system("rtx4090-pcie4"), small_trace(model, [(7, 2)]), "hobbit:cache_high=3").plan
    assert plan.prefill_class is not None
    assert plan.prefill_tokens is not None
    used = plan.prefill_class[plan.prefill_tokens > 0]
    assert {plan.classes[c] for c in used.tolist()} == {(FETCH, 16.0, False, When.NOW)}


def test_hobbit_gates_need_weights() -> None:
    bare = dataclasses.replace(recording(), topk_weights=None)
    with pytest.raises(PolicyError, match=r"split=gates needs routing weights"):
        plan_run(mixtral(), NDP_SYSTEM, bare, "hobbit:split=gates", output=2)
    plan_run(mixtral(), NDP_SYSTEM, bare, "hobbit", output=2)


# --- sequences on their own ---


def same_decisions(run: Run, sequence: int, alone: Run) -> bool:
    """Whether a sequence's picks, prefill and migration are the same alone as among others."""
    together = run.plan
    if decided(run, sequence) != decided(alone, 0):
        return False
    if together.prefill_class is not None and together.prefill_tokens is not None:
        assert alone.plan.prefill_class is not None
        for e, tokens in np.ndenumerate(together.prefill_tokens[sequence]):
            work = alone.plan.classes[alone.plan.prefill_class[0][e]]
            if tokens and together.classes[together.prefill_class[sequence][e]] != work:
                return False
    return bool(together.migrated_experts[sequence] == alone.plan.migrated_experts[0])


@settings(max_examples=100)
@given(st.data(), st.sampled_from(["context-aware", "monde", "hobbit"]))
def test_no_sequence_depends_on_another(data, name) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True if name == "context-aware" else None))
    text = data.draw(policy_texts(model, [name]))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    text = without_chance(text)
    run = plan_run(model, NDP_SYSTEM, trace, text)
    for s in range(trace.num_sequences):
        assert same_decisions(run, s, plan_run(model, NDP_SYSTEM, trace.sequences([s]), text))


# --- traces and systems that lack something ---


def decode_only() -> RoutingTrace:
    """Two sequences without prefill rows."""
    return small_trace(plain_model(), [(0, 5), (0, 3)], seed=1)


def test_a_trace_without_prefill() -> None:
    model = plain_model()
    with pytest.raises(PolicyError, match=r"context-aware places experts from each sequence's prefill.*no prefill"):
        plan_run(model, NDP_SYSTEM, decode_only(), "context-aware")
    partly = small_trace(model, [(3, 5), (0, 3)])
    with pytest.raises(PolicyError, match="no prefill"):
        plan_run(model, NDP_SYSTEM, partly, "context-aware", prompt=5)
    for name in ("static", "monde", "hobbit"):
        run = plan_run(model, NDP_SYSTEM, decode_only(), name, prompt=10)
        assert run.contexts.tolist() == [11, 12, 13, 14, 15, 11, 12, 13]
        evaluation = run.price()
        assert evaluation.ttft_s is None
        assert evaluation.end_to_end_s is None
        assert evaluation.prefill_decode_cosine is None
        assert evaluation.tpot_mean_s > 0


def test_a_trace_without_decode_is_refused() -> None:
    model = plain_model()
    for lengths in ([(3, 0)], [(3, 2), (4, 0)]):
        with pytest.raises(TraceError, match="no decode step"):
            plan_run(model, NDP_SYSTEM, small_trace(model, lengths), "monde")


def test_static_needs_another_sequence() -> None:
    single = recording().sequences([1])
    with pytest.raises(PolicyError, match=r"at least 2 sequences, found 1"):
        plan_run(mixtral(), NDP_SYSTEM, single, "static")
    for name in ("context-aware", "monde", "hobbit"):
        plan_run(mixtral(), NDP_SYSTEM, single, name, output=2)


def test_a_system_without_a_near_data_device() -> None:
    model, desktop = plain_model(), load_system("rtx4090-pcie4")
    trace = small_trace(model, [(3, 2), (4, 3)])
    for name, kind in POLICIES.items():
        if kind.needs_ndp:
            with pytest.raises(PolicyError, match=rf"policy {name} runs experts on a near-data device.*rtx4090-pcie4"):
                plan_run(model, desktop, trace, name)
    evaluation = plan_run(model, desktop, trace, "hobbit:prefetch_accuracy=0.5").price()
    assert evaluation.ndp_side_s == 0
    assert np.isfinite(evaluation.tpot_mean_s)
    assert set(evaluation.memory_bytes) == {"gpu", "host"}


def test_near_data_work_is_not_priced_without_a_device() -> None:
    model, desktop = plain_model(), load_system("rtx4090-pcie4")
    run = plan_run(model, NDP_SYSTEM, small_trace(model, [(3, 2)]), "monde")
    with pytest.raises(PolicyError, match="near-data"):
        run.price(desktop)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("context-aware:gpu_experts=5", "option gpu_experts: found 5, allowed 0 to 4"),
        ("static:gpu_experts=5", "option gpu_experts: found 5, allowed 0 to 4"),
        ("monde:resident=5", "option resident: found 5, allowed 0 to 4"),
        ("hobbit:cache_high=5", "option cache_high: found 5, allowed 0 to 4"),
        ("hobbit:cache_low=5", "option cache_low: found 5, allowed 0 to 4"),
    ],
)
def test_more_experts_than_the_model_has_are_refused(policy: str, text: str) -> None:
    model = plain_model()
    with pytest.raises(PolicyError, match=text):
        plan_run(model, NDP_SYSTEM, small_trace(model, [(3, 2), (4, 3)]), policy)


# --- text ---


@given(st.data())
def test_a_policy_survives_its_own_text(data) -> None:
    policy = parse_policy(data.draw(policy_texts(mixtral())))
    assert parse_policy(policy.spec) == policy
    assert type(parse_policy(policy.spec)) is type(policy)


@given(st.floats(1.0, 4.0), st.floats(0.0, 1.0), st.one_of(st.none(), st.integers(0, 512)))
def test_numbers_survive_to_the_last_bit(bits, alpha, count) -> None:
    for kind in (ContextAware, Static):
        policy = kind(mean_bits=bits, alpha=alpha, gpu_experts=count)
        assert parse_policy(policy.spec) == policy
    policy = Hobbit(t1=alpha, t2=1.0, low_bits=bits, prefetch_accuracy=alpha)
    assert parse_policy(policy.spec) == policy


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_defaults(name: str) -> None:
    policy = parse_policy(name)
    assert policy == POLICIES[name]()
    assert parse_policy(f"  {name} : ") == policy
    assert policy.spec.startswith(f"{name}:")
    names = [field.name for field in dataclasses.fields(policy)]
    assert [info.name for info in policy.options()] == names
    for info in policy.options():
        assert info.meaning
        assert info.allowed
        assert f"{info.name}=" in policy.spec


def test_options_are_read() -> None:
    expected = ContextAware(
        mean_bits=2.5, gpu_experts=3, selector="prefix", alpha=0.0, norm="min-max", overlap="sum", prefill="fetch"
    )
    text = "context-aware: mean_bits=2.5 ,gpu_experts = 3, alpha=0,norm=min-max,overlap=sum,prefill=fetch"
    assert parse_policy(text) == expected
    assert parse_policy("context-aware:gpu_experts=auto") == ContextAware()
    assert parse_policy("monde:reading=balance,rounding=ceil") == Monde(reading="balance", rounding="ceil")
    assert parse_policy("hobbit:t1=0.5,cache_low=2") == Hobbit(t1=0.5, cache_low=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "found ''.*allowed context-aware, static, monde, hobbit"),
        (":", "found ''"),
        ("nothing", "found 'nothing'"),
        ("mond", "did you mean monde?"),
        ("context_aware", "did you mean context-aware?"),
        ("Hobbit", "did you mean hobbit?"),
        ("monde:readin=one", "unknown option 'readin', allowed reading, resident.*did you mean reading"),
        ("hobbit:cache=1", "unknown option 'cache'.*cache_"),
        ("monde:resident", "found 'resident', allowed key=value"),
        ("monde:one", "found 'one', allowed key=value"),
        ("monde:=1", "unknown option ''"),
        ("monde:resident=", "option resident: found ''"),
        ("monde:resident=1,resident=1", "option resident is given twice"),
        ("monde:resident=1.0", "option resident: found '1.0'"),
        ("monde:resident=one", "option resident: found 'one'"),
        ("monde:resident=auto", "option resident: found 'auto'"),
        ("monde:resident=-1", "option resident: found -1, allowed 0 to E"),
        ("monde:resident=1,reading=balance", "option resident: found 1, allowed 0 unless reading=one"),
        ("monde:reading=two", "option reading: found 'two', allowed one | balance | all-ndp"),
        ("monde:reading=One", "option reading: found 'One'"),
        ("monde:reading=one=two", "option reading: found 'one=two'"),
        ("context-aware:mean_bits=0.99", "option mean_bits: found 0.99, allowed 1 to 4"),
        ("context-aware:mean_bits=4.01", "option mean_bits: found 4.01, allowed 1 to 4"),
        ("context-aware:mean_bits=nan", "option mean_bits: found 'nan', allowed 1 to 4"),
        ("context-aware:mean_bits=inf", "option mean_bits: found 'inf', allowed 1 to 4"),
        ("context-aware:mean_bits=1e999", "option mean_bits: found '1e999', allowed 1 to 4"),
        ("context-aware:mean_bits=auto", "option mean_bits: found 'auto', allowed 1 to 4"),
        ("context-aware:mean_bits=2.5,selector=uniform", "option mean_bits: found 2.5, allowed a whole number"),
        ("context-aware:gpu_experts=-1", "option gpu_experts: found -1, allowed 0 to E"),
        ("context-aware:gpu_experts=2.5", "option gpu_experts: found '2.5', allowed 0 to E"),
        ("context-aware:alpha=1.5", "option alpha: found 1.5, allowed 0 to 1"),
        ("context-aware:alpha=-0.1", "option alpha: found -0.1, allowed 0 to 1"),
        ("static:norm=max", "policy static: option norm: found 'max', allowed sum | min-max"),
        ("hobbit:t1=1.1", "option t1: found 1.1, allowed 0 to 1"),
        ("hobbit:t1=0.5,t2=0.4", "option t2: found 0.4, allowed t1=0.5 to 1"),
        ("hobbit:t2=1.1", "option t2: found 1.1"),
        ("hobbit:low_bits=0.5", "option low_bits: found 0.5, allowed 1 to 16"),
        ("hobbit:low_bits=17", "option low_bits: found 17"),
        ("hobbit:cache_high=-1", "option cache_high: found -1, allowed 0 to E"),
        ("hobbit:cache_low=-2", "option cache_low: found -2, allowed 0 to E"),
        ("hobbit:prefetch_accuracy=1.01", "option prefetch_accuracy: found 1.01, allowed 0 to 1"),
        ("hobbit:prefetch_accuracy=-inf", "option prefetch_accuracy: found '-inf', allowed 0 to 1"),
    ],
)
def test_bad_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(PolicyError, match=expected.replace("|", r"\|").replace("?", r"\?")) as caught:
        parse_policy(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (ContextAware, {"mean_bits": math.nan}),
        (ContextAware, {"alpha": math.nan}),
        (ContextAware, {"selector": "prefixes"}),
        (ContextAware, {"norm": "max"}),
        (ContextAware, {"overlap": "maximum"}),
        (ContextAware, {"prefill": "gpu"}),
        (ContextAware, {"gpu_experts": 2.5}),
        (ContextAware, {"gpu_experts": True}),
        (Static, {"mean_bits": "3"}),
        (Monde, {"reading": "two"}),
        (Monde, {"rounding": "up"}),
        (Monde, {"resident": 1.5}),
        (Hobbit, {"split": "weights"}),
        (Hobbit, {"cache_high": 0.5}),
        (Hobbit, {"prefetch_accuracy": math.nan}),
        (Hobbit, {"low_bits": math.inf}),
    ],
)
def test_bad_values_are_refused_without_text_as_well(kind, values) -> None:
    with pytest.raises(PolicyError, match=next(iter(values))):
        kind(**values)


#: What sets the split of MoNDE's own rule.
RATES = {
    "link.bandwidth_gb_per_s",
    "link.efficiency",
    "ndp.dram_bandwidth_gb_per_s",
    "ndp.dram_efficiency",
    "ndp.dram.",
    "ndp.mapping",
    "ndp.read_buffer",
}


def test_the_keys_that_a_plan_reads() -> None:
    expected = {
        "context-aware": set(),
        "context-aware:gpu_experts=2,prefill=fetch": set(),
        "context-aware:gpu_experts=2,prefill=balanced": RATES,
        "static:gpu_experts=0": set(),
        "static:prefill=balanced": RATES,
        "monde": set(),
        "monde:reading=all-ndp": set(),
        "monde:reading=balance": RATES,
        "monde:prefill=balanced": RATES,
        "hobbit": set(),
    }
    capacities = {"gpu.memory_capacity_gb", "ndp.capacity_gb", "cpu.memory_capacity_gb", "host.pinned_memory_gb"}
    capacities |= {"cpu.sockets", "cpu.numa", "gpu.devices"}
    assert {text: set(parse_policy(text).plan_keys) for text in expected} == {
        text: capacities | keys for text, keys in expected.items()
    }


def reads(policy: Policy, key: str) -> bool:
    """Whether a policy says that its plan reads a key."""
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in policy.plan_keys)


def test_every_key_that_a_plan_reads_exists() -> None:
    system = NDP_SYSTEM._copy(cpu=load_spec("xeon-gold-6454s"), host=load_spec("measured"))
    keys = {f"{part}.{key}" for part, spec in system._parts() for key in spec.settable_keys()}
    for policy in (Monde(reading="balance"), Hobbit()):
        for one in policy.plan_keys:
            assert any(key == one or (one.endswith(".") and key.startswith(one)) for key in keys), one


@settings(max_examples=60)
@given(st.data())
def test_no_other_key_changes_a_plan(data) -> None:
    model = data.draw(models())
    trace = data.draw(traces(model, min_sequences=2, prefill=True))
    text = data.draw(policy_texts(model))
    if trace.topk_weights is None:
        text = text.replace("split=gates", "split=published")
    policy, system = parse_policy(text), data.draw(systems())
    changed: dict[str, Any] = {}
    for key in system.numeric_keys():
        # The numbers of a DRAM organisation depend on each other; the efficiency that replaces them all is below.
        if not reads(policy, key) and not key.startswith("ndp.dram."):
            table = key.startswith("ndp.native_rate_by_bits.")
            limits = Limits(0.5, 8.0, False, "1") if table else system.limits_of(key)
            value = data.draw(st.floats(limits.low, limits.high))
            changed[key] = round(value) if limits.whole else value
    if not reads(policy, "ndp.dram_efficiency"):
        changed["ndp.dram_efficiency"] = data.draw(st.floats(0.1, 1.0))
    one, other = (plan_run(model, machine, trace, policy).plan for machine in (system, system.with_values(changed)))
    for field in dataclasses.fields(one):
        assert_equal(getattr(one, field.name), getattr(other, field.name), field.name)


def test_every_rate_of_the_split_changes_a_plan() -> None:
    model = plain_model(num_experts=40, top_k=8)
    trace = small_trace(model, [(30, 3)])
    system = NDP_SYSTEM.with_values({"ndp.mapping": "bank-group-limited", "link.bandwidth_gb_per_s": 400})
    low_and_high: dict[str, tuple[float | str, float | str]] = {
        "link.bandwidth_gb_per_s": (40, 800),
        "link.efficiency": (0.1, 1.0),
        "ndp.dram_bandwidth_gb_per_s": (51.2, 5120),
        "ndp.dram_efficiency": (0.1, 1.0),
        "ndp.dram.n_refi": (500, 100_000),
        "ndp.mapping": ("row-by-row", "bank-group-interleaved"),
        "ndp.read_buffer": (1, 32),
    }
    for text in ("monde:reading=balance", "monde:prefill=balanced", "context-aware:prefill=balanced"):
        policy = parse_policy(text)
        for key, values in low_and_high.items():
            assert reads(policy, key)
            plans = [plan_run(model, system.with_values({key: value}), trace, policy).plan for value in values]
            same = all(np.array_equal(getattr(plans[0], a), getattr(plans[1], a)) for a in ("picks", "prefill_class"))
            assert not same, (text, key)


# --- budgets that say less or more than is spent ---


def test_a_mean_between_two_budgets_is_noted() -> None:
    model = plain_model(num_experts=6)
    trace = small_trace(model, [(9, 6), (5, 4)], seed=3)
    for text, words in (
        ("gpu_experts=2,mean_bits=2.1", "4 near-data experts a layer spend a mean of 2.1 bits as 2; the next is 2.25"),
        (
            "gpu_experts=3,mean_bits=2.9",
            "3 near-data experts a layer spend a mean of 2.9 bits as 2.66667; the next is 3",
        ),
        ("gpu_experts=2,mean_bits=2.1,scope=model", "12 near-data experts spend a mean of 2.1 bits as 2.08333;"),
        ("gpu_experts=2,mean_bits=2.25", None),
        ("gpu_experts=2,mean_bits=2.3333333333333335,scope=model", None),
        ("gpu_experts=3,mean_bits=2.3333333333333335", None),
        ("gpu_experts=2,selector=uniform,mean_bits=2", None),
    ):
        run = plan_run(model, NDP_SYSTEM, trace, f"context-aware:{text}")
        found = [note for note in run.plan.notes if " spend " in note]
        assert len(found) == (words is not None)
        assert words is None or found[0].startswith(words)
        spent = float(re.findall(r"bits as ([\d.]+)", found[0])[0]) if found else run.policy.mean_bits
        assert_allclose(run.plan.sequence_bits, [spent, spent], rtol=1e-5, atol=0)


def test_a_floor_above_the_default_mean_says_what_to_give() -> None:
    model = plain_model()
    trace = small_trace(model, [(9, 6)])
    for text, words in (
        ("min_bits=4", "found 3, allowed 4 with min_bits=4; it is 3 by default, so give mean_bits=4"),
        ("min_bits=4,mean_bits=2", "found 2, allowed 4 with min_bits=4"),
    ):
        with pytest.raises(PolicyError) as error:
            plan_run(model, NDP_SYSTEM, trace, f"context-aware:{text}")
        assert str(error.value) == f"policy context-aware: option mean_bits: {words}"
    assert plan_run(model, NDP_SYSTEM, trace, "context-aware:min_bits=4,mean_bits=4").plan.mean_bits == 4


def test_widths_that_are_too_wide_are_named() -> None:
    model = plain_model()
    trace = small_trace(model, [(9, 6)])
    wide = LossTable(np.ones((3, 4, 4)), "wide", bits=(2, 4, 6, 8))
    run = plan_run(model, NDP_SYSTEM, trace, "context-aware:gpu_experts=2", losses=wide)
    assert "widths 6, 8 of loss table wide are not used: near-data experts go up to 4 bits" in run.plan.notes
    assert run.plan.replica_bits == (2.0, 4.0)
    with pytest.raises(PolicyError, match="loss table eight are 8, above the 4 bits that near-data experts go up to"):
        plan_run(model, NDP_SYSTEM, trace, "context-aware", losses=LossTable(np.ones((3, 4, 1)), "eight", bits=(8,)))


def test_options_without_effect_are_noted_and_can_still_be_combined() -> None:
    model = plain_model()
    trace = small_trace(model, [(9, 6)])
    for text, words in (
        (
            "selector=uniform,objective=use,budget=at-most",
            "no effect: objective=use, budget=at-most, as selector=uniform",
        ),
        ("selector=full,scope=model", "no effect: scope=model, as selector=full searches nothing"),
        ("selector=uniform", None),
        ("selector=optimum,objective=use,scope=model,budget=at-most", None),
    ):
        notes = plan_run(model, NDP_SYSTEM, trace, f"context-aware:gpu_experts=1,{text}").plan.notes
        found = [note for note in notes if note.startswith("no effect")]
        assert len(found) == (words is not None)
        assert words is None or found[0].startswith(words)


def test_a_mean_with_gaps_names_the_sequence_and_the_layer() -> None:
    model = plain_model()
    trace = small_trace(model, [(9, 6)])
    few = LossTable(np.ones((3, 4, 2)), "few", bits=(2, 4))
    for scope, words in (
        ("layer", "the 3 experts of sequence 0, layer 0 cannot"),
        ("model", "the 9 experts of sequence 0 cannot"),
    ):
        with pytest.raises(PolicyError, match=words):
            plan_run(model, NDP_SYSTEM, trace, f"context-aware:gpu_experts=1,mean_bits=2.6,scope={scope}", losses=few)
