"""Price plans on machines: what one policy costs on one system, for the routing that really happened.

Time adds up: layers and the LM head to a token, tokens to a sequence. Within a layer, attention and router are timed
by the context length alone and the experts by the layer's state alone, which is why grouping equal contexts and equal
states loses nothing. The first output token comes out of the prefill; ``N`` output tokens are ``N`` decode steps.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel import placement
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, PolicyError, TraceError
from perfmodel.evaluation import METRICS, PARTS, RESOURCES, Evaluation, HitRates, metric, percentile_of
from perfmodel.hardware import System, load_system
from perfmodel.kernels import front, layer
from perfmodel.kernels import price as kernel
from perfmodel.kernels import work as kinds
from perfmodel.kernels.cpu import ACTIVATION_BYTES
from perfmodel.model import MoEModel
from perfmodel.operators import attention_rows, fixed_counts, operator_rows, operators, prefill_attention_rows
from perfmodel.point import Points, hardware_point
from perfmodel.policies import Executor, Plan, PlanInputs, Policy, When, footprints, parse_policy
from perfmodel.policies.costs import expert_matrices
from perfmodel.quality import Quality, SequenceQuality, plan_quality, sequence_quality
from perfmodel.routing import Replay, RoutingTrace, statistics
from perfmodel.routing.batches import in_batches
from perfmodel.routing.replay import Batch, BatchOf, checked_batch
from perfmodel.states import States, decode_states, prefill_states

#: Row of the LM head in the operators.
_HEAD = 2
#: Most tokens of a prefill pass that are taken for a number of tokens, as of an engine.
_MOST_MICRO_BATCH = 10**9


@dataclass(frozen=True)
class Run:
    """One policy planned on one trace; pricing it on a further machine does not plan again.

    Build it with `plan_run`. Where ``plan`` depends on hardware, pricing another system keeps the plan as it is.
    ``losses`` is the loss table that was given, or None for the default one. ``micro_batch`` is the most tokens of a
    pass of the prefill, or None for one pass.
    """

    model: MoEModel
    system: System
    replay: Replay
    policy: Policy
    plan: Plan
    losses: LossTable | None = None
    micro_batch: int | None = None

    @property
    def batch(self) -> Batch:
        """What one decode step is."""
        return self.replay.batch

    @functools.cached_property
    def decode(self) -> States:
        """Distinct states of the decode steps."""
        if self.batch.tokens == 1:
            return decode_states(self.plan)
        return decode_states(self.plan, self.replay.decode_ids, self.batch.tokens)

    @functools.cached_property
    def passes(self) -> NDArray[np.int64]:
        """In how many passes the prefill of every sequence, or of those in a batch, runs [S]."""
        prompts = np.maximum(self.plan.prompt_tokens, 1)
        return -(-prompts // self.micro_batch) if self.micro_batch else np.ones_like(prompts)

    @functools.cached_property
    def prefill(self) -> States | None:
        """States of the prefill, or of its mean pass, or None when the trace holds none."""
        return prefill_states(self.plan, self.passes if (self.passes > 1).any() else None)

    @functools.cached_property
    def contexts(self) -> NDArray[np.float64]:
        """Tokens that every token of a decode step attends to on average, itself included [steps]."""
        size = self.batch.tokens
        lengths = np.diff(self.plan.offsets) // size
        step = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if self.batch.of == "tokens":
            step = step * size + (size - 1) / 2
        return np.asarray(np.repeat(self.plan.context_start, lengths) + step + 1, dtype=np.float64)

    @functools.cached_property
    def _state_count(self) -> NDArray[np.float64]:
        return self.decode.state_count

    @functools.cached_property
    def _work_count(self) -> NDArray[np.float64]:
        return self.decode.work_count(self._state_count)

    @functools.cached_property
    def _attention(self) -> NDArray[np.float64]:
        return attention_rows(self.model, float(self.batch.tokens), float(self.batch.sequences))

    @functools.cached_property
    def _matrices(self) -> NDArray[np.float64]:
        return expert_matrices(self.model)

    def _states(self, states: States, overlapped: bool) -> tuple[Any, ...]:
        """What the kernels want to know about experts and states, in their order."""
        how = np.zeros(layer.HOW_SIZE, np.int64)
        how[layer.OVERLAPPED] = overlapped
        how[layer.PIPELINED] = self.plan.fetch == "pipelined"
        how[layer.ATTENTION_ON_CPU] = self.plan.attention_on == "cpu"
        how[layer.TRUNK_ON_CPU] = self.plan.trunk_on == "cpu"
        return (
            float(self.model.num_layers),
            states.work,
            float(self.model.expert_params),
            float(self.model.hidden_size),
            self._matrices,
            states.row_offsets,
            states.row_work,
            states.row_count,
            states.row_host,
            states.state_row,
            states.state_before,
            how,
        )

    @functools.cached_property
    def _decode_inputs(self) -> tuple[Any, ...]:
        states = self._states(self.decode, self.plan.overlap == "max")
        size = float(self.batch.tokens)
        counts = fixed_counts(self.model, size, sequences=float(self.batch.sequences))
        return (self._attention, operator_rows(self.model, size, size), counts, *states)

    @functools.cached_property
    def _mean_inputs(self) -> tuple[Any, ...]:
        tokens = float(len(self.contexts))
        if any(work.when != When.NOW for work in self.plan.classes):
            every = np.ones(len(self.contexts))
            return (*self._decode_inputs, self._state_count, self.contexts, every, tokens, *self._token_states)
        contexts, count = np.unique(self.contexts, return_counts=True)
        none = np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0)
        return (*self._decode_inputs, self._state_count, contexts, count.astype(np.float64), tokens, *none)

    @functools.cached_property
    def _token_states(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float64]]:
        """The states of every decode step, see `kernels.layer.token_states`."""
        offsets, state, count = layer.token_states(self.decode.state_id, len(self.decode.state_row))
        return offsets, state, count

    @functools.cached_property
    def _token_inputs(self) -> tuple[Any, ...]:
        return (*self._decode_inputs, self.contexts, *self._token_states)

    @functools.cached_property
    def _prefill_inputs(self) -> tuple[Any, ...] | None:
        states, prompts = self.prefill, self.plan.prompt_tokens.astype(np.float64)
        if states is None:
            return None
        # A prefill overlaps both sides of a layer whatever the decode does.
        by_sequence = states._replace(
            state_row=np.ascontiguousarray(states.state_row[states.state_id.ravel()]),
            state_before=np.ascontiguousarray(states.state_before[states.state_id.ravel()]),
        )
        rows = np.array([operator_rows(self.model, prompt, 1.0) for prompt in prompts.tolist()])
        offsets = np.arange(len(prompts) + 1, dtype=np.int64) * states.state_id.shape[1]
        once = np.ones(len(prompts))
        counts = np.array([fixed_counts(self.model, prompt) for prompt in prompts.tolist()])
        return (
            attention_rows(self.model),
            rows,
            counts,
            *self._states(by_sequence, True),
            offsets,
            prompts,
            once,
            once,
        )

    def mean_token_s(self, points: Points | ArrayLike) -> NDArray[np.float64]:
        """Mean time per output token at every hardware point [N] [s]; points as in `metrics`."""
        return self.metrics(("tpot_mean_s",), points)["tpot_mean_s"]

    def metrics(self, names: Iterable[str], points: Points | ArrayLike) -> dict[str, NDArray[np.float64]]:
        """Metrics at every hardware point, each [N], in the units of `evaluation.METRICS`.

        Parameters
        ----------
        names : metrics to compute; only what they need is computed.
        points : hardware points, from ``point.hardware_points``; or float64 [N, POINT_SIZE], rows of
            ``point.hardware_point``.

        `price` takes its numbers from here too, and how points are grouped into calls changes no bit. What the trace
        or the policy cannot tell (``ttft_s`` without a prefill) is NaN.

        Raises
        ------
        PerfModelError : an unknown metric, or something else than points.
        """
        wanted = [metric(name) for name in names]
        many = points if isinstance(points, Points) else Points.of(points)
        families = dict.fromkeys(one.family for one in wanted)
        found: dict[str, NDArray[np.float64]] = {}
        for part, columns in many.by_words():
            for family in families:
                priced = _PRICED[family](self, part, [one.name for one in wanted if one.family == family])
                if part is many:
                    found |= priced
                    continue
                for name, values in priced.items():
                    found.setdefault(name, np.empty(many.num_points))[columns] = values
        return {one.name: found[one.name] for one in wanted}

    def token_times(self, point: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time of every decode step at one hardware point, sequences one after another [T] [s]."""
        none = np.empty(0, np.int64), np.empty(0)
        return np.asarray(kernel.token_percentiles(*Points.one(point), *self._token_inputs, *none)[:, 0])

    def prefill_times(self, point: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Time from the prompt to the first output token, one a sequence [S] [s]; None without a prefill."""
        if self._prefill_inputs is None:
            return None
        return np.asarray(self._prefill_times(Points.one(point))[:, 0])

    def _prefill_times(self, points: Points) -> NDArray[np.float64]:
        """Time of every prefill at every point [S, N] [s]; only with a prefill."""
        assert self._prefill_inputs is not None
        if not self._in_passes:
            return np.asarray(kernel.prefill_times(*points, *self._prefill_inputs))
        times = [kernel.prefill_times(*points, *inputs)[0] * n for inputs, n in self._pass_inputs]
        return np.array(times)

    @property
    def _in_passes(self) -> bool:
        """Whether a prefill is more than one prompt in one pass."""
        return self.batch.sequences > 1 or bool((self.passes > 1).any())

    @functools.cached_property
    def _pass_inputs(self) -> list[tuple[tuple[Any, ...], int]]:
        """What the kernels want to know about the mean pass of every prefill, and how many passes it has.

        Attention is given as the work of the whole pass, so that prompts of any lengths may share one.
        """
        assert self._prefill_inputs is not None
        *states, offsets, _, _, _ = self._prefill_inputs[3:]
        one = np.ones(1)
        found = []
        for s, (prompt, n) in enumerate(zip(self.plan.prompt_tokens.tolist(), self.passes.tolist(), strict=True)):
            members = np.array([prompt]) if self.replay.members is None else self.replay.members[s]
            attention = prefill_attention_rows(self.model, members, n)
            rows = operator_rows(self.model, prompt / n, float(len(members)))[None]
            rows[0, _HEAD, front.REPEATS] /= n  # only the last pass has one
            counts = fixed_counts(self.model, prompt / n, sequences=len(members) / n)[None]
            found.append(((attention, rows, counts, *states, offsets[s : s + 2].copy(), one, one, one), n))
        return found

    def migration_times(self, point: NDArray[np.float64]) -> NDArray[np.float64]:
        """One-off copies of hot experts to the GPU, one transfer an expert, one time a sequence [S] [s]."""
        return np.asarray(self.plan.migrated_experts * self._copy_times(Points.one(point)))

    def _copy_times(self, points: Points) -> NDArray[np.float64]:
        """One copy of an expert at its stored precision [N] [s]."""
        return np.asarray(kernel.copy_times(*points, float(self.model.expert_bytes(self.model.expert_bits))))

    def bytes_per_token(self, system: System | None = None) -> dict[str, float]:
        """Mean bytes a decode step moves for each of its tokens, by tier.

        A system matters only by the group scales of its device.
        """
        return _bytes_per_token(self, system or self.system)

    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes by device and use."""
        gpu, behind = footprints(PlanInputs(self.model, self.system, self.replay, None), self.plan)
        return {
            device: {**use._asdict(), "total": use.total}
            for device, use in (("gpu", gpu), ("ndp" if self.system.ndp else "host", behind))
        }

    @functools.cached_property
    def hit_rates(self) -> HitRates:
        """Share of decode picks that find their expert on the GPU; with controls where the policy places experts."""
        plan = self.plan
        if plan.hot is not None and plan.alpha is not None:
            return _hit_rates(self.replay.trace, plan.hot, plan.alpha, plan.norm)
        resident = np.array([work.executor == Executor.GPU for work in plan.classes])
        hits = (resident[plan.picks] & self.replay.assigned).sum(axis=(1, 2))
        asked = np.add.reduceat(self.replay.assigned.sum(axis=(1, 2)), plan.offsets[:-1])
        shares = np.add.reduceat(hits, plan.offsets[:-1]) / np.maximum(asked, 1)
        own = float(shares.mean())
        # Experts in a buffer, at bits of their own or in turns, are not counted as residents of every layer.
        known = plan.gpu_experts > 0 or own == 0.0
        return HitRates(own, plan.gpu_experts / self.model.num_experts if known else None, None, None, None)

    @functools.cached_property
    def quality(self) -> Quality:
        """Expected quantisation loss of the decode picks, see `perfmodel.quality`."""
        return plan_quality(self.model, self.replay, self.plan, self.losses)

    @functools.cached_property
    def sequence_quality(self) -> SequenceQuality:
        """The same for every sequence on its own."""
        return sequence_quality(self.model, self.replay, self.plan, self.losses)

    def price(self, system: System | None = None) -> Evaluation:
        """All metrics of this plan on a system (by default the one it was planned for)."""
        return _price(self, system or self.system)


def _means(run: Run, points: Points, names: list[str]) -> dict[str, NDArray[np.float64]]:
    with_parts = any(name not in _FROM_MEAN for name in names)
    means = kernel.token_means(*points, *run._mean_inputs, with_parts)
    mean = means[kernel.TOTAL]
    steps = len(run.contexts) / (len(run.plan.offsets) - 1)
    found: dict[str, Any] = {}
    for name in names:
        if name in _FROM_MEAN:
            found[name] = _FROM_MEAN[name](mean, steps, float(run.batch.tokens))
        elif name == "overhead_s":
            found[name] = means[kernel.OVERHEAD] + means[kernel.STATE + layer.PATH_HOST]
        elif name in ("busy_gpu_s", "busy_cpu_s"):
            device = name.split("_")[1]
            found[name] = means[kernel.STATE + _BUSY[device]] + 0.0
            if run.plan.attention_on == device:
                found[name] += means[kernel.ATTENTION]
            if run.plan.trunk_on == device:
                found[name] += means[kernel.ROUTER] + means[kernel.DENSE] + means[kernel.HEAD]
        else:
            found[name] = means[_ROWS[name]]
    return found


#: What follows from the mean step alone, from how many steps a sequence has, and from the tokens of a step.
_FROM_MEAN: dict[str, Callable[[NDArray[np.float64], float, float], NDArray[np.float64]]] = {
    "tpot_mean_s": lambda mean, steps, tokens: mean,
    "decode_tok_per_s": lambda mean, steps, tokens: tokens / mean,
    "decode_s": lambda mean, steps, tokens: mean * steps,
}
#: Where the other means stand in the result of the kernel.
_ROWS = {
    "attention_s": kernel.ATTENTION,
    "router_s": kernel.ROUTER,
    "dense_s": kernel.DENSE,
    "head_s": kernel.HEAD,
    "experts_gpu_s": kernel.STATE + layer.PATH_GPU,
    "link_s": kernel.STATE + layer.PATH_LINK,
    "ndp_s": kernel.STATE + layer.PATH_NDP,
    "cpu_s": kernel.STATE + layer.PATH_CPU,
    "busy_link_s": kernel.STATE + layer.BUSY_LINK,
    "busy_ndp_s": kernel.STATE + layer.BUSY_NDP,
}
_BUSY = {"gpu": layer.BUSY_GPU, "cpu": layer.BUSY_CPU}


def _percentiles(run: Run, points: Points, names: list[str]) -> dict[str, NDArray[np.float64]]:
    # The place of a percentile among the steps, as NumPy computes it.
    asked = np.array([percentile_of(name) for name in names], dtype=np.float64)
    place = (len(run.contexts) - 1) * (asked / 100.0)
    rank = np.floor(place)
    found = kernel.token_percentiles(*points, *run._token_inputs, rank.astype(np.int64), place - rank)
    return dict(zip(names, found, strict=True))


def _prefills(run: Run, points: Points, names: list[str]) -> dict[str, NDArray[np.float64]]:
    found = {"migration_s": run.plan.migrated_experts.mean() * run._copy_times(points)}
    if names != ["migration_s"]:
        found["ttft_s"] = np.full(points.num_points, np.nan)
        if run._prefill_inputs is not None:
            # Added one sequence after another: NumPy's mean sums in an order that depends on the number of points.
            times = run._prefill_times(points)
            found["ttft_s"] = functools.reduce(np.add, times) / len(times)
    if "end_to_end_s" in names:
        decode = _means(run, points, ["decode_s"])["decode_s"]
        found["end_to_end_s"] = found["ttft_s"] + found["migration_s"] + decode
    return found


def _decisions(run: Run, points: Points, names: list[str]) -> dict[str, NDArray[np.float64]]:
    gpu, behind = (use["total"] for use in run.memory().values())
    found = {"gpu_memory_bytes": gpu, "offload_memory_bytes": behind}
    if "hit_rate" in names:
        found["hit_rate"] = run.hit_rates.own
    if not _OF_QUALITY.keys().isdisjoint(names):
        found |= {name: getattr(run.quality, field) for name, field in _OF_QUALITY.items()}
    return {name: np.full(points.num_points, found[name]) for name in names}


#: Metrics that are fields of `Run.quality`.
_OF_QUALITY = {"quant_loss": "loss", "quant_loss_vs_uniform": "vs_uniform", "quant_noise": "noise"}
_PRICED: dict[str, Callable[[Run, Points, list[str]], dict[str, NDArray[np.float64]]]] = {
    "mean": _means,
    "percentile": _percentiles,
    "prefill": _prefills,
    "plan": _decisions,
}


def _bytes_per_token(run: Run, system: System) -> dict[str, float]:
    model, states, plan = run.model, run.decode, run.plan
    tokens = float(len(run.contexts) * run.batch.tokens)
    work = states.work
    count = run._work_count / tokens
    size = float(run.batch.tokens)
    executor, bits = work[:, kinds.EXECUTOR], work[:, kinds.BITS]
    activations = 2.0 * model.hidden_size * ACTIVATION_BYTES
    of_work = activations * work[:, kinds.TOKENS]
    weights = model.expert_params * bits / 8
    scale_bits = system.ndp.scale_bits_per_weight if system.ndp is not None else 0.0
    elements = sum(rows * cols for rows, cols in model.expert_matrices)
    fetched, near = executor == Executor.FETCH, executor == Executor.NDP
    on = {"gpu": (executor == Executor.GPU) | fetched, "cpu": executor == Executor.CPU}
    crossing = float((count * near * work[:, kinds.TOKENS]).sum())
    crossing += float((states.row_host[states.state_row, layer.CROSSING] * run._state_count).sum()) / tokens
    moved = {device: float((count * there * (weights + of_work)).sum()) for device, there in on.items()}
    *around, shared = (op.row(model, size) for op in operators(model))
    moved[plan.trunk_on] += sum(row[front.REPEATS] * row[front.BYTES] for row in around) / size
    moved[plan.trunk_on] += len(model.moe_layers) * shared[front.BYTES] / size
    for row in run._attention:
        kv = row[front.CONTEXT_BYTES] * float(np.minimum(run.contexts, row[front.WINDOW]).mean())
        moved[plan.attention_on] += float(row[front.LAYERS] * (row[front.WEIGHT_BYTES] + kv)) / size
    return {
        "gpu_memory": moved["gpu"],
        "link_weights": float((count * (fetched | (executor == Executor.COPY)) * weights).sum()),
        "link_activations": crossing * activations,
        "ndp_memory": float((count * near * elements * (bits + work[:, kinds.QUANTISED] * scale_bits) / 8).sum()),
        "cpu_memory": moved["cpu"],
    }


def _hit_rates(trace: RoutingTrace, hot: NDArray[np.bool_], alpha: float, norm: placement.Norm) -> HitRates:
    count = int(hot[0, 0].sum())
    own = statistics.hit_rate(trace, hot).over_sequences
    # The controls place by the same rule; without a prefill there is no other sequence's prefill to place by.
    phase: Literal["prefill", "decode"] = "prefill" if trace.has_prefill else "decode"
    values = placement.importance(trace, alpha=alpha, norm=norm, phase=phase).values
    controls = statistics.hit_rate_controls(trace, count, values)
    return HitRates(
        own=own,
        uniform=controls.uniform,
        other_sequence=controls.other_sequence if trace.has_prefill else None,
        static=controls.static,
        oracle=controls.oracle,
    )


def _floor(run: Run, system: System) -> float:
    """Busiest tier at its datasheet rate: no schedule of the same traffic of a step is faster [s]."""
    moved = {tier: size * run.batch.tokens for tier, size in run.bytes_per_token(system).items()}
    times = [
        moved["gpu_memory"] / system.gpu.memory_bandwidth_bytes_per_s,
        # Copies and activations do not contend in this model, and the two directions of activations take turns.
        max(moved["link_weights"], moved["link_activations"]) / system.link.bandwidth_bytes_per_s,
    ]
    if system.ndp is not None:
        times.append(moved["ndp_memory"] / system.ndp.dram_bandwidth_bytes_per_s)
    if system.cpu is not None:
        times.append(moved["cpu_memory"] / system.cpu.dram_bandwidth_bytes_per_s)
    return max(times)


#: What `price` takes from `metrics`.
_EVALUATED = tuple(name for name, one in METRICS.items() if one.family != "plan")


def _price(run: Run, system: System) -> Evaluation:
    if len(run.contexts) == 0:
        raise TraceError("the trace holds no decode step to price")
    plan = run.plan
    needed = {Executor.NDP: ("a near-data device", system.ndp), Executor.CPU: ("the cpu", system.cpu)}
    for executor, (what, part) in needed.items():
        if part is None and any(work.executor == executor for work in plan.classes):
            raise PolicyError(
                f"the plan of {run.policy.name} runs experts on {what}, and system {system.name} has none"
            )
    priced = run.metrics(_EVALUATED, Points.one(hardware_point(system)))
    one = {name: float(values[0]) for name, values in priced.items()}
    breakdown = {part: one[f"{part}_s"] for part in PARTS}
    by_resource = {"gpu": 0.0, "cpu": 0.0, "overhead": 0.0, "link": 0.0, "ndp": 0.0}
    at = {"attention": plan.attention_on, "experts_gpu": "gpu"}
    for name, seconds in breakdown.items():
        where = at.get(name, name)
        # Shared experts count with the experts of the side that runs them.
        by_resource[where if where in by_resource else plan.trunk_on] += seconds
    lengths = np.diff(plan.offsets)
    prefill = run.prefill
    cosine = statistics.load_cosine(run.replay.trace) if prefill is not None else None
    metadata = run.replay.trace.metadata
    quality = {name: getattr(run.quality, field) for name, field in _OF_QUALITY.items()}
    return Evaluation(
        policy=plan.policy,
        model=run.model.name,
        system=system.name,
        trace=str(metadata.get("model", "unnamed")),
        trace_source=str(metadata.get("source", "unknown")),
        prompt_tokens=float(plan.context_start.mean()),
        output_tokens=float(lengths.mean()) / run.batch.sequences,
        ttft_s=None if prefill is None else one["ttft_s"],
        migration_s=one["migration_s"],
        end_to_end_s=None if prefill is None else one["end_to_end_s"],
        decode_s=one["decode_s"],
        tpot_mean_s=one["tpot_mean_s"],
        tpot_p50_s=one["tpot_p50_s"],
        tpot_p95_s=one["tpot_p95_s"],
        tpot_p99_s=one["tpot_p99_s"],
        tpot_max_s=one["tpot_max_s"],
        decode_tok_per_s=one["decode_tok_per_s"],
        ndp_side_s=one["busy_ndp_s"],
        breakdown_s=breakdown,
        busy_s={resource: one[f"busy_{resource}_s"] for resource in RESOURCES},
        bytes_per_token=run.bytes_per_token(system),
        memory_bytes=run.memory(),
        bandwidth_floor_s=_floor(run, system),
        binding_resource=max(by_resource, key=by_resource.__getitem__),
        hit_rate=run.hit_rates,
        prefill_decode_cosine=None if cosine is None else tuple(float(c) for c in cosine),
        **{name: None if math.isnan(value) else value for name, value in quality.items()},
        weakest_source=system.weakest_source(),
        batch=run.batch.tokens,
        batch_of=run.batch.of,
        notes=tuple(dict.fromkeys((*run.replay.notes, *plan.notes, *run.quality.notes, *system.flags))),
    )


def plan_run(
    model: MoEModel | str | Path,
    system: System | str | Path,
    trace: RoutingTrace | Replay | str | Path,
    policy: Policy | str,
    *,
    prompt: int | None = None,
    output: int | None = None,
    losses: LossTable | None = None,
    layers: Literal["cycle"] | None = None,
    batch: int = 1,
    batch_of: BatchOf = "sequences",
    micro_batch: int | None = None,
) -> Run:
    """Plan a policy on a trace without pricing it; parameters and errors as in `evaluate`.

    A Replay may be given instead of a trace, so that several policies share one.
    """
    network = MoEModel.from_config(model) if isinstance(model, str | Path) else model
    machine = load_system(system) if isinstance(system, str | Path) else system
    recorded = RoutingTrace.load(trace) if isinstance(trace, str | Path) else trace
    rule = parse_policy(policy) if isinstance(policy, str) else policy
    for name, value, kind in (
        ("model", network, MoEModel),
        ("system", machine, System),
        ("trace", recorded, RoutingTrace | Replay),
        ("policy", rule, Policy),
    ):
        if not isinstance(value, kind):
            raise PerfModelError(f"{name}: found {type(value).__name__}, allowed a name, a path, or the object itself")
    if losses is not None and not isinstance(losses, LossTable):
        raise PerfModelError(f"losses: found {type(losses).__name__}, allowed a LossTable")
    if micro_batch is not None and (isinstance(micro_batch, bool) or not isinstance(micro_batch, int | np.integer)):
        raise PerfModelError(f"micro_batch: found {micro_batch!a:.40}, allowed a whole number of tokens")
    if micro_batch is not None and not 1 <= micro_batch <= _MOST_MICRO_BATCH:
        raise PerfModelError(f"micro_batch: found {micro_batch!a:.40}, allowed 1 to {_MOST_MICRO_BATCH} tokens")
    if isinstance(recorded, Replay):
        asked = checked_batch(batch, batch_of)
        if asked.tokens != 1 and asked != recorded.batch:
            raise PerfModelError(
                f"batch: found {batch} {batch_of}, allowed what the given replay was made for: {recorded.batch.tokens}"
            )
        replay = recorded
    else:
        replay = make_replay(network, recorded, prompt, output, layers, batch, batch_of)
    if not replay.trace.has_decode:
        raise TraceError("the trace holds no decode step in some sequence, and decode is what is priced")
    plan = rule.plan(PlanInputs(network, machine, replay, losses))
    if micro_batch is None and machine.engine is not None and machine.engine.micro_batch_tokens is not None:
        micro_batch = int(machine.engine.micro_batch_tokens)
    return Run(network, machine, replay, rule, plan, losses, None if micro_batch is None else int(micro_batch))


def make_replay(
    model: MoEModel,
    trace: RoutingTrace,
    prompt: int | None = None,
    output: int | None = None,
    layers: Literal["cycle"] | None = None,
    batch: int = 1,
    batch_of: BatchOf = "sequences",
) -> Replay:
    """Fit a trace to a model and a workload: layers mapped, prompts and outputs truncated or cycled, steps batched."""
    asked = checked_batch(batch, batch_of)
    model.with_experts()
    if trace.num_experts_inferred and trace.num_experts <= model.num_experts:
        trace = trace.with_num_experts(model.num_experts)
    trace.check_model(model)
    return in_batches(trace.replay(prompt, output, model.moe_layers, layers, model.name), asked)


def evaluate(
    model: MoEModel | str | Path,
    system: System | str | Path,
    trace: RoutingTrace | str | Path,
    policy: Policy | str,
    *,
    prompt: int | None = None,
    output: int | None = None,
    losses: LossTable | None = None,
    layers: Literal["cycle"] | None = None,
    batch: int = 1,
    batch_of: BatchOf = "sequences",
    micro_batch: int | None = None,
) -> Evaluation:
    """What a policy costs on a system, for a recorded trace.

    Parameters
    ----------
    model : shape of the network, or the name or path of a config.
    system : a system, or the name or path of a spec.
    trace : recorded routing of a model with the same experts and top-k, or its name or path.
    policy : a policy, or its text such as ``"monde:reading=balance"``.
    prompt, output : tokens of every sequence [1]; recorded steps are truncated or cycled from their start. By
        default the recorded lengths.
    losses : loss table of the bitwidth search and of the quality; by default the bundled measured one where its
        expert count fits, else one proportional to ``4**-bits`` (assumed).
    layers : ``"cycle"`` to replay a trace with another number of layers.
    batch, batch_of : tokens of a decode step [1]: the next ones of as many sequences of the trace, or ``"tokens"``
        that follow one another in one sequence; see ``docs/batches.md``.
    micro_batch : most tokens of a pass of the prefill [1]; by default what the system's engine says, else one pass.

    Raises
    ------
    TraceError : the trace does not fit the model or the policy's needs.
    PolicyError : bad options, or a system without what the policy needs.
    PlacementError : weights that do not fit in memory.
    """
    how: dict[str, Any] = {"batch": batch, "batch_of": batch_of, "micro_batch": micro_batch}
    run = plan_run(model, system, trace, policy, prompt=prompt, output=output, losses=losses, layers=layers, **how)
    return run.price()


__all__ = ["PARTS", "Evaluation", "HitRates", "Run", "evaluate", "make_replay", "plan_run"]
