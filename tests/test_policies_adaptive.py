"""Migrations while decoding: what is moved and when, against a plain loop, and what it is worth."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray
from strategies import NDP_SYSTEM, mixtral, models, plain_model, recording, small_trace, systems, traces

from perfmodel import oracle
from perfmodel.errors import PolicyError
from perfmodel.families import params_of
from perfmodel.hardware import System
from perfmodel.kernels import point as place
from perfmodel.kernels.picks import look_up
from perfmodel.model import MoEModel
from perfmodel.point import hardware_point
from perfmodel.policies import Executor, When, adaptive, footprints, parse_policy
from perfmodel.policies.base import PlanInputs
from perfmodel.policies.costs import expert_costs
from perfmodel.policies.drift import count_spread
from perfmodel.routing import Replay, RoutingTrace
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate
from perfmodel.run import Run, plan_run

#: The placement that knows what comes, and the steps of one of its windows.
KNOWN = "context-aware:selector=full,alpha=1"
WINDOWS = (64, 128)


@st.composite
def texts(draw: st.DrawFn, model: MoEModel, selectors: tuple[str, ...]) -> str:
    """The policy with every option of its own; short windows, as the traces are short."""
    window = draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "gpu_experts": draw(st.integers(0, model.num_experts)) if draw(st.booleans()) else model.num_experts // 2,
        "selector": draw(st.sampled_from(selectors)),
        "overlap": draw(st.sampled_from(["max", "sum"])),
        "window": window,
        "watch": draw(st.sampled_from(["hit-rate", "queue"])),
        "threshold": draw(st.sampled_from([0, 0, 0.2])),
        "swaps": draw(st.integers(0, 1) if model.num_experts == 1 else st.integers(1, min(3, model.num_experts))),
        "hysteresis": draw(st.sampled_from([0, 0, 0.5])),
        "memory": draw(st.sampled_from([0, 0.5, 1])),
        "payback": draw(st.sampled_from([1, 10**6, 10**6])),
        "migrate": draw(st.sampled_from(["now", "behind"])),
        "pieces": draw(st.integers(1, window)),
    }
    return f"adaptive:{','.join(f'{key}={value}' for key, value in options.items())}"


@st.composite
def runs(draw: st.DrawFn, selectors: tuple[str, ...] = ("full", "prefix")) -> Run:
    """Random systems, on half of which near-data memory is slow, so that migrations pay."""
    model, system = draw(models()), draw(systems())
    if draw(st.booleans()):
        system = system.with_values({"ndp.dram_bandwidth_gb_per_s": 1.0, "gpu.launch_overhead_us": 0.0})
    trace = draw(traces(model, prefill=True, max_decode=30))
    return plan_run(model, system, trace, draw(texts(model, selectors)))


def fixed_text(run: Run) -> str:
    """The context-aware policy with the options that both have."""
    own = dict(part.split("=", 1) for part in run.policy.spec.partition(":")[2].split(","))
    names = {info.name for info in type(parse_policy("context-aware")).options()}
    return "context-aware:" + ",".join(f"{name}={value}" for name, value in own.items() if name in names)


def executors(run: Run) -> NDArray[np.int64]:
    return np.array([int(work.executor) for work in run.plan.classes])


@given(runs())
def test_runs_equal_the_plain_loop(run: Run) -> None:
    assert oracle.largest_difference(run.price(), oracle.per_pick(run)) <= 1e-12


@given(runs())
def test_every_assigned_pick_is_executed_once(run: Run) -> None:
    of_pick = executors(run)[run.plan.picks]
    assert_array_equal(of_pick == Executor.SKIP, ~run.replay.assigned)
    assert set(np.unique(of_pick)) <= {Executor.GPU, Executor.NDP, Executor.SKIP}


@given(runs())
def test_bytes_over_the_link_are_those_of_the_migrations(run: Run) -> None:
    moved = run.bytes_per_token()["link_weights"] * len(run.plan.picks)
    if run.plan.copies is None:
        assert moved == 0.0
        return
    copies = executors(run)[run.plan.copies] == Executor.COPY
    pieces = float(dict(part.split("=", 1) for part in run.policy.spec.partition(":")[2].split(","))["pieces"])
    bytes_of_one = run.model.expert_params * run.model.expert_bits / 8 / pieces
    assert moved == pytest.approx(copies.sum() * bytes_of_one, rel=1e-12, abs=0)


@given(runs())
def test_plans_keep_what_the_fixed_placement_keeps_and_are_reproducible(run: Run) -> None:
    fixed = plan_run(run.model, run.system, run.replay, fixed_text(run))
    own, other = run.plan, fixed.plan
    assert (own.gpu_experts, own.gpu_buffer_bytes, own.replica_bits, own.mean_bits) == (
        other.gpu_experts,
        other.gpu_buffer_bytes,
        other.replica_bits,
        other.mean_bits,
    )
    assert_array_equal(own.migrated_experts, other.migrated_experts)
    inputs = PlanInputs(run.model, run.system, run.replay, None)
    assert footprints(inputs, own)[0].total <= run.system.gpu.memory_capacity_bytes
    again = run.policy.plan(inputs)
    assert_array_equal(again.picks, own.picks)
    if own.copies is not None:
        assert_array_equal(again.copies, own.copies)


@given(runs(), st.integers(1, 19))
def test_only_earlier_steps_are_looked_at(run: Run, step: int) -> None:
    """Whatever comes after a step, the plan up to it stays."""
    trace = run.replay.trace
    first, prompt = int(trace.sequence_offsets[0]), int(trace.prompt_len[0])
    stop = min(first + prompt + step, int(trace.sequence_offsets[1]))
    cut = trace.take_rows([np.arange(first, stop)], [prompt], None)
    short = plan_run(run.model, run.system, cut, run.policy).plan
    steps = stop - first - prompt
    classes = [[run.plan.classes[c] for c in row] for row in run.plan.picks[:steps].reshape(-1, trace.top_k)]
    assert [[short.classes[c] for c in row] for row in short.picks.reshape(-1, trace.top_k)] == classes


@given(st.data())
def test_neither_the_bits_nor_the_experts_on_the_gpu_grow(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []

        def keeping(*given: Any) -> Any:
            seen.append(given[:2])
            return look_up(*given)

        patch.setattr(adaptive, "look_up", keeping)
        run = data.draw(runs())
    tables, offsets = seen[-1]
    on_gpu = executors(run) == Executor.GPU
    at = np.searchsorted(offsets, run.plan.offsets[:-1])
    first = tables[at[np.searchsorted(at, np.arange(len(tables)), side="right") - 1]][..., :-1]
    assert (on_gpu[tables[..., :-1]].sum(axis=-1) <= on_gpu[first].sum(axis=-1)).all()
    full_again = on_gpu[tables[..., :-1]].sum(axis=(1, 2)) == on_gpu[first].sum(axis=(1, 2))
    assert full_again[at].all()
    assert_array_equal(np.sort(tables[full_again][..., :-1], axis=-1), np.sort(first[full_again], axis=-1))


@settings(max_examples=100)
@given(st.data())
def test_migrations_are_those_of_a_plain_loop(data: st.DataObject) -> None:
    run = data.draw(runs(("full",)))
    model, trace = run.model, run.replay.trace
    fixed = plan_run(model, run.system, run.replay, fixed_text(run))
    assert fixed.plan.hot is not None
    options = {info.name: getattr(run.policy, info.name) for info in type(run.policy).options()}
    for s in range(trace.num_sequences):
        prompt = trace.topk_ids[trace.prefill_slice(s)].tolist()
        steps = trace.topk_ids[trace.decode_slice(s)].tolist()
        for layer, copied, on_gpu in _plain(run, options, prompt, steps, fixed.plan.hot[s]):
            start = run.plan.offsets[s]
            rows = slice(start, start + len(steps))
            found = np.zeros(len(steps), np.int64)
            if run.plan.copies is not None:
                found = (executors(run)[run.plan.copies[rows, layer]] == Executor.COPY).sum(axis=1)
            assert_array_equal(found, copied)
            of_pick = executors(run)[run.plan.picks[rows, layer]]
            for step, picked in enumerate(steps):
                for j, expert in enumerate(picked[layer]):
                    if expert < model.num_experts:
                        assert (of_pick[step, j] == Executor.GPU) == (expert in on_gpu[step])


@given(st.floats(0.0, 0.8), st.integers(0, 99))
def test_counts_of_picks_that_cling_spread_more(rho: float, seed: int) -> None:
    """One pick a step, kept with the chance rho, else drawn anew: counts then vary (1 + rho) / (1 - rho) times more."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, 8, (400, 30, 1))
    keep = rng.random(picks.shape) < rho
    for step in range(1, len(picks)):
        np.copyto(picks[step], picks[step - 1], where=keep[step])
    assert count_spread(picks.astype(np.uint16), 8) == pytest.approx((1 + rho) / (1 - rho), rel=0.15, abs=0)


def _shared_s(run: Run) -> float:
    """Shared experts of a layer: the slower of computing and reading, and three launches."""
    kinds = run.model.feed_forward
    params = sum(len(kind.layers) * params_of(kind.shared) for kind in kinds) / run.model.num_moe_layers
    if params == 0:
        return 0.0
    point = hardware_point(run.system)
    moved = params * run.model.storage.shared.bits / 8 + 4.0 * run.model.hidden_size
    computing = 2.0 * params / point[place.GPU_FLOPS]
    reading = (moved + point[place.GPU_N_HALF]) / point[place.GPU_BANDWIDTH]
    return float(max(computing, reading) + 3 * point[place.LAUNCH_OVERHEAD])


def _plain(
    run: Run, options: dict[str, Any], prompt: list[Any], steps: list[Any], hot: NDArray[np.bool_]
) -> Iterable[tuple[int, list[int], list[set[int]]]]:
    """Copies of every step and experts on the GPU in it, for every layer of a sequence; full precision alone."""
    experts, window, pieces = run.model.num_experts, options["window"], options["pieces"]
    layers = range(hot.shape[0])
    cost = expert_costs(run.model, run.system, 1, float(run.model.expert_bits))
    piece_s = expert_costs(run.model, run.system, 1, float(run.model.expert_bits) / pieces).copy_s
    gpu_s, near_s, behind = float(cost.gpu_s[0]), float(cost.ndp_s[0]), options["migrate"] == "behind"
    shared_s = _shared_s(run)

    def uses(rows: list[Any], layer: int) -> Counter[int]:
        return Counter(expert for row in rows for expert in row[layer] if expert < experts)

    def lasting_s(rows: list[Any], layer: int, lasts: int, done: int, copying: set[int], there: set[int]) -> float:
        total = 0.0
        slow = pieces - (not behind)
        for row in rows:
            took = []
            for placed in (copying, there):
                known = [expert in placed for expert in row[layer] if expert < experts]
                gpu, near = gpu_s * sum(known) + shared_s, near_s * (len(known) - sum(known))
                took.append(max(gpu, near) if options["overlap"] == "max" else gpu + near)
            waits = pieces * max(0.0, done * piece_s - behind * took[0])
            total += slow * took[0] + max(0, lasts - slow) * took[1] + waits
        return total / len(rows)

    def spread(rows: list[Any]) -> float:
        """From pairs of steps, counted one by one."""
        if len(rows) < 2:
            return 1.0
        sets = [[{e for e in row[layer] if e < experts} for layer in layers] for row in rows]
        again = sum(len(a & b) for one, two in pairwise(sets) for a, b in zip(one, two, strict=True))
        picked = sum(len(a) for one in sets[1:] for a in one)
        shared = 2 * sum(len(a & b) for one, two in combinations(sets, 2) for a, b in zip(one, two, strict=True))
        every = (len(sets) - 1) * sum(len(a) for one in sets for a in one)
        share, chance = again / max(1, picked), shared / max(1, every)
        if share <= chance:
            return 1.0
        rho = (share - chance) / (1 - chance)
        return min(len(rows), (1 + rho) / (1 - rho)) if rho < 1 else len(rows)

    remembered = window / (1 - options["memory"]) if options["memory"] < 1 else math.inf
    state = [set(np.flatnonzero(hot[layer]).tolist()) for layer in layers]
    shown = [[state[layer] for _ in steps] for layer in layers]
    copies = [[0] * len(steps) for _ in layers]
    counts, promised = [], []
    for layer in layers:
        used = uses(prompt, layer)
        scale = min(1.0, remembered * run.model.top_k / max(1, sum(used.values())))
        counts.append({e: used[e] * scale for e in range(experts)})
        promised.append((sum(used[e] for e in range(experts) if hot[layer, e]), sum(used.values())))
    for step in range(window, len(steps), window):
        recent = [uses(steps[step - window : step], layer) for layer in layers]
        for layer in layers:
            counts[layer] = {e: counts[layer][e] * options["memory"] + recent[layer][e] for e in range(experts)}
        held = [
            (sum(n for e, n in recent[layer].items() if e in state[layer]), sum(recent[layer].values()))
            for layer in layers
        ]
        together = [sum(one[0] for one in many) / max(1, sum(one[1] for one in many)) for many in (promised, held)]
        for layer in layers:
            if options["watch"] == "queue":
                was, now = (one[0] / max(1, one[1]) for one in (promised[layer], held[layer]))
                short = (was - now) * held[layer][1] / window
            else:
                short = together[0] - together[1]
            if abs(short - options["threshold"]) < 1e-9 and short != options["threshold"]:
                return  # a tie that rounding decides
            if short <= options["threshold"]:
                continue
            rows = steps[max(0, step - round(min(step, remembered))) : step]
            there = copying = state[layer]
            done, lasts, factor = 0, min(options["payback"], step), options["hysteresis"] * spread(rows)
            took = lasting_s(rows, layer, lasts, 0, there, there)
            for _ in range(options["swaps"]):
                cold = [e for e in range(experts) if e not in there]
                if not cold or not there:
                    break
                # The first of equals is the lower one.
                new = max(cold, key=counts[layer].__getitem__)
                old = min(sorted(there), key=counts[layer].__getitem__)
                more, less = counts[layer][new], counts[layer][old]
                lead = factor * math.sqrt(more + less)
                if abs(more - less - lead) <= 1e-9 * (more + less) and factor:
                    return
                if more - less <= lead:
                    break
                fewer, tried = copying - {old}, there - {old} | {new}
                then = lasting_s(rows, layer, lasts, done + 1, fewer, tried)
                if abs(then - took) <= 1e-9 * took:
                    return
                if then >= took:
                    break
                there, copying, took, done = tried, fewer, then, done + 1
            if done:
                for later in range(step, len(steps)):
                    copies[layer][later] += done * (later < step + pieces)
                    all_there = later >= step + pieces - (not behind)
                    shown[layer][later] = there if all_there else state[layer] & there
                state[layer] = there
    yield from zip(layers, copies, shown, strict=True)


@pytest.mark.parametrize("migrate", ["now", "behind"])
def test_one_change_of_topic_is_followed(migrate: str) -> None:
    """Experts 0 and 1 in the prompt, then 2 and 3 alone: both change places, one a window, spread over two steps."""
    model = plain_model(num_layers=1, num_experts=4, top_k=2)
    ids = np.array([[[0, 1]]] * 6 + [[[2, 3]]] * 20)
    trace = small_trace(model, [(6, 20)])
    trace = RoutingTrace(
        ids, None, trace.sequence_offsets, trace.prompt_len, trace.layer_index, trace.num_experts, trace.metadata
    )
    options = f"selector=full,gpu_experts=2,window=4,pieces=2,memory=0,hysteresis=0,swaps=1,migrate={migrate}"
    slow = NDP_SYSTEM.with_values({"ndp.dram_bandwidth_gb_per_s": 1.0, "gpu.launch_overhead_us": 0.0})
    run = plan_run(model, slow, trace, f"adaptive:overlap=sum,{options}")
    hits = (executors(run)[run.plan.picks[:, 0]] == Executor.GPU).sum(axis=1).tolist()
    at = 6 if migrate == "behind" else 5
    assert hits == [0] * at + [1] * 4 + [2] * (16 - at)
    assert run.plan.copies is not None
    copied = executors(run)[run.plan.copies[:, 0, 0]] == Executor.COPY
    assert np.flatnonzero(copied).tolist() == [4, 5, 8, 9]
    moved = next(work for work in run.plan.classes if work.executor == Executor.COPY)
    assert (moved.bits, moved.when) == (8.0, When.BEHIND if migrate == "behind" else When.NOW)


def windows(trace: RoutingTrace, length: int) -> Replay:
    """Every window of decode steps as a sequence whose prompt is the window itself, at the context it really has."""
    rows, context = [], []
    for s in range(trace.num_sequences):
        decode = trace.decode_slice(s)
        for start in range(decode.start, decode.stop, length):
            own = np.arange(start, min(start + length, decode.stop))
            rows.append(np.concatenate([own, own]))
            context.append(trace.prompt_len[s] + start - decode.start)
    prompts = [len(own) // 2 for own in rows]
    return Replay(trace.take_rows(rows, prompts, None), np.array(context), ())


def joined(trace: RoutingTrace, pairs: Iterable[tuple[int, int]]) -> RoutingTrace:
    """Sequences that go on, after their own decode steps, with those of another one."""
    rows, prompts = [], []
    for one, other in pairs:
        own = np.arange(trace.sequence_offsets[one], trace.sequence_offsets[one + 1])
        then = trace.decode_slice(other)
        rows.append(np.concatenate([own, np.arange(then.start, then.stop)]))
        prompts.append(trace.prompt_len[one])
    return trace.take_rows(rows, prompts, None)


def synthetic(seed: int) -> RoutingTrace:
    """Six sequences of as much skew as Mixtral's; not those that the defaults were searched on."""
    return generate(6, 128, 512, 32, 8, 2, **MIXTRAL_SKEW._asdict(), seed=seed)


def switching(seed: int, before: int, after: int) -> RoutingTrace:
    """Two sequences of as much skew as Mixtral's that turn into others after some steps."""
    every = generate(4, 128, [before, after] * 2, 32, 8, 2, **MIXTRAL_SKEW._asdict(), seed=seed)
    return joined(every, [(0, 1), (2, 3)])


def token_s(
    trace: RoutingTrace | Replay, text: str, model: MoEModel | None = None, system: str | System = NDP_SYSTEM
) -> float:
    return plan_run(model or mixtral(), system, trace, text).price().tpot_mean_s


def recovered(trace: RoutingTrace, window: int) -> float:
    """Share of the time between the fixed placement and the one that knows each window that adapting saves."""
    fixed, known = token_s(trace, "context-aware:selector=full"), token_s(windows(trace, window), KNOWN)
    assert known < 0.95 * fixed
    return (fixed - token_s(trace, "adaptive:selector=full")) / (fixed - known)


@pytest.mark.parametrize("bits", ["selector=full", "mean_bits=4", "mean_bits=3", "mean_bits=2"])
def test_it_is_no_slower_where_routing_stays_as_it_is(bits: str) -> None:
    for trace in (recording(), synthetic(11), synthetic(12)):
        assert token_s(trace, f"adaptive:{bits}") <= 1.01 * token_s(trace, f"context-aware:{bits}")


def test_it_is_no_slower_on_the_whole_recording(shared: Path) -> None:
    trace = RoutingTrace.load(shared / "tiny-mixtral" / "tiny-mixtral-32l.npz")
    for bits in ("selector=full", "mean_bits=3"):
        assert token_s(trace, f"adaptive:{bits}") <= 1.01 * token_s(trace, f"context-aware:{bits}")


@pytest.mark.parametrize("stickiness", [0.0, 1.4, 3.0])
@pytest.mark.parametrize(("prompt", "answer"), [(4, 300), (256, 100)])
def test_it_is_no_slower_where_routing_clings(stickiness: float, prompt: int, answer: int) -> None:
    """What clings is used for a while and left again; following it would cost more than it saves."""
    concentration = 15.0 if stickiness == 1.4 else 1e9
    shape: Any = {"alpha": 9.1, "sequence_concentration": concentration, "stickiness": stickiness}
    trace = generate(3, prompt, answer, 32, 8, 2, **shape, seed=61)
    for bits in ("selector=full", "mean_bits=4"):
        assert token_s(trace, f"adaptive:{bits}") <= 1.01 * token_s(trace, f"context-aware:{bits}")


@pytest.mark.parametrize("system", ["h100-cxl-ndp", "h100-cxl2-ndp", "a100-cxl-ndp"])
@pytest.mark.parametrize("bits", ["selector=full", "mean_bits=4,gpu_experts=16", "mean_bits=3,gpu_experts=16"])
def test_it_is_no_slower_beside_shared_experts(bits: str, system: str) -> None:
    """Shared experts keep the GPU busy, so that at few bits its side is the slower one; also after a switch."""
    size, hidden = 1408, 2048
    model = plain_model(
        num_layers=4, num_experts=64, top_k=6, hidden_size=hidden, expert_size=size, shared_params=6 * hidden * size
    )
    trace = generate(4, 128, 300, 4, 64, 6, alpha=9.1, sequence_concentration=30.0, stickiness=0.25, seed=23)
    switch = joined(trace, [(0, 1), (2, 3)])
    for one in (trace, switch):
        fixed = token_s(one, f"context-aware:{bits}", model, system)
        assert token_s(one, f"adaptive:{bits}", model, system) <= 1.01 * fixed
    known = token_s(windows(switch, WINDOWS[1]), f"context-aware:{bits},alpha=1", model, system)
    if known < fixed:
        assert fixed - token_s(switch, f"adaptive:{bits}", model, system) >= 0.5 * (fixed - known)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("before", "after"), [(512, 512), (200, 300), (1000, 300)])
def test_it_recovers_half_of_the_gap_after_a_known_switch(before: int, after: int, window: int) -> None:
    """In the middle of the answer the sequence turns into another one; experts are of full precision."""
    for seed in (11, 12):
        assert recovered(switching(seed, before, after), window) >= 0.5


def test_it_recovers_less_where_the_topic_soon_ends() -> None:
    """Of 128 steps too many are gone before there is evidence; still faster than the fixed placement."""
    for seed in (11, 12):
        assert 0.3 <= recovered(switching(seed, 200, 128), WINDOWS[0]) < 0.5


@pytest.mark.parametrize("window", WINDOWS)
def test_it_recovers_half_of_the_gap_on_two_recordings_in_one(window: int) -> None:
    """The bundled sequences are short: 600 decode steps and more take all of the longest ones."""
    trace = joined(recording(), [(5, 1), (2, 1), (1, 5), (0, 1)])
    assert recovered(trace, window) >= 0.5


@pytest.mark.parametrize("window", WINDOWS)
def test_it_recovers_half_of_the_gap_on_two_long_recordings_in_one(shared: Path, window: int) -> None:
    trace = RoutingTrace.load(shared / "tiny-mixtral" / "tiny-mixtral-32l.npz")
    assert recovered(joined(trace, [(49, 50), (50, 54), (53, 48), (48, 54)]), window) >= 0.5


def test_at_few_bits_there_is_no_gap_to_recover() -> None:
    """Near memory 3 bits take as long as 16 on this GPU: a placement by counts alone, which knows all, is slower."""
    trace = joined(synthetic(11), [(0, 1), (2, 3)])
    fixed = token_s(trace, "context-aware")
    assert all(token_s(windows(trace, window), "context-aware:alpha=1") > fixed for window in WINDOWS)
    assert token_s(trace, "adaptive") <= 1.01 * fixed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("pieces=9", "option pieces: found 9, allowed 1 to 8, the window"),
        ("window=4,pieces=5", "allowed 1 to 4"),
        ("window=0", "option window"),
        ("hysteresis=-1", "option hysteresis"),
        ("memory=1.5", "option memory"),
        ("watch=link", "option watch"),
        ("swaps=5", "option swaps: found 5, allowed 0 to 4 for plain"),
    ],
)
def test_bad_options_are_refused_in_one_line(options: str, message: str) -> None:
    model = plain_model()
    with pytest.raises(PolicyError, match=message) as error:
        plan_run(model, NDP_SYSTEM, small_trace(model, [(3, 4)]), f"adaptive:{options}")
    assert "\n" not in str(error.value)


def test_what_does_not_apply_is_refused() -> None:
    model = plain_model()
    with pytest.raises(PolicyError, match="policy adaptive places experts from each sequence's prefill"):
        plan_run(model, NDP_SYSTEM, small_trace(model, [(0, 4)]), "adaptive")
    with pytest.raises(PolicyError, match="near-data device"):
        plan_run(model, "rtx4090-pcie4-cpu", small_trace(model, [(3, 4)]), "adaptive")
