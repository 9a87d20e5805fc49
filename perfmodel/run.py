"""Price plans on machines: what one policy costs on one system, for the routing that really happened.

Time adds up: layers and the LM head to a token, tokens to a sequence. Within a layer, attention and router are timed
by the context length alone and the experts by the layer's state alone, which is why grouping equal contexts and equal
states loses nothing. The first output token comes out of the prefill; ``N`` output tokens are ``N`` decode steps.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel import placement
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PerfModelError, PolicyError, TraceError
from perfmodel.evaluation import PARTS, Evaluation, HitRates, metric, percentile_of
from perfmodel.hardware import System, load_system
from perfmodel.kernels import front
from perfmodel.kernels import point as place
from perfmodel.kernels import replay as kernel
from perfmodel.kernels.replay import ACTIVATION_BYTES
from perfmodel.model import MoEModel
from perfmodel.operators import attention_rows, operators
from perfmodel.point import Points, hardware_point
from perfmodel.policies import Executor, Plan, PlanInputs, Policy, parse_policy
from perfmodel.routing import Replay, RoutingTrace, statistics
from perfmodel.states import States, decode_states, prefill_states


class TokenParts(NamedTuple):
    """Decode steps in additive parts.

    attention, experts : float64 [T], time of every step [s]. fixed : parts that are the same in every step [s].
    mean_state : float64 [STATE_SIZE], the expert part of a mean step, by the columns of ``kernels/replay.py`` [s].
    """

    attention: NDArray[np.float64]
    fixed: dict[str, float]
    experts: NDArray[np.float64]
    mean_state: NDArray[np.float64]

    @property
    def times(self) -> NDArray[np.float64]:
        """Time of every decode step [T] [s]."""
        return np.asarray(self.attention + sum(self.fixed.values()) + self.experts)


@dataclass(frozen=True)
class Run:
    """One policy planned on one trace; pricing it on a further machine does not plan again.

    Build it with `plan_run`. Where ``plan`` depends on hardware, pricing another system keeps the plan as it is.
    """

    model: MoEModel
    system: System
    replay: Replay
    policy: Policy
    plan: Plan

    @functools.cached_property
    def decode(self) -> States:
        """Distinct states of the decode steps."""
        return decode_states(self.plan)

    @functools.cached_property
    def prefill(self) -> States | None:
        """States of the prefill, or None when the trace holds none."""
        return prefill_states(self.plan)

    @functools.cached_property
    def contexts(self) -> NDArray[np.float64]:
        """Tokens that every decode step attends to, itself included [T]."""
        lengths = np.diff(self.plan.offsets)
        step = np.arange(int(self.plan.offsets[-1])) - np.repeat(self.plan.offsets[:-1], lengths)
        return np.asarray(np.repeat(self.plan.context_start, lengths) + step + 1, dtype=np.float64)

    @functools.cached_property
    def _distinct_contexts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        contexts, count = np.unique(self.contexts, return_counts=True)
        return contexts, count.astype(np.float64)

    @functools.cached_property
    def _state_count(self) -> NDArray[np.float64]:
        return self.decode.state_count()

    @functools.cached_property
    def _work_count(self) -> NDArray[np.float64]:
        return self.decode.work_count(self._state_count)

    @functools.cached_property
    def _attention(self) -> NDArray[np.float64]:
        return attention_rows(self.model)

    @functools.cached_property
    def _per_token(self) -> NDArray[np.float64]:
        return np.array([op.row(self.model, 1.0) for op in operators(self.model)])

    @functools.cached_property
    def _matrices(self) -> NDArray[np.float64]:
        return np.array(self.model.expert_matrices, dtype=np.float64)

    def _expert_shape(self, states: States) -> tuple[Any, ...]:
        """What the state kernels want to know about experts and states, in their order."""
        return (
            states.work,
            float(self.model.expert_params),
            float(self.model.hidden_size),
            self._matrices,
            states.row_offsets,
            states.row_work,
            states.row_count,
            states.state_row,
            states.state_before,
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

        The same kernels as `price` in the same order, so both give the same numbers. What the trace or the policy
        cannot tell (``ttft_s`` without a prefill, ``hit_rate`` without a placement) is NaN.

        Raises
        ------
        PerfModelError : an unknown metric, or something else than points.
        """
        wanted = {name: metric(name) for name in names}
        many = points if isinstance(points, Points) else Points.of(points)
        dense = many.dense()
        found: dict[str, NDArray[np.float64]] = {}
        evaluations = [_price_point(self, point, wanted) for point in dense]
        for name in wanted:
            found[name] = np.array([one[name] if name in one else float("nan") for one in evaluations])
        return found

    def token_parts(self, point: NDArray[np.float64]) -> "TokenParts":
        """Every decode step at one hardware point, sequences one after another, in its additive parts."""
        fixed = front.operator_times(point[None, :], self._per_token)[0]
        states = kernel.state_times(
            point, *self._expert_shape(self.decode), float(fixed[-1]), self.plan.overlap == "max"
        )
        return TokenParts(
            attention=front.decode_attention_times(point, self.contexts, self._attention),
            fixed={
                "router": float(fixed[0]),
                "dense": float(fixed[1]),
                "head": float(fixed[2]),
                "overhead": float(self.model.num_layers * point[place.LAYER_OVERHEAD]),
            },
            experts=kernel.token_sums(np.ascontiguousarray(states[:, kernel.TIME]), self.decode.state_id),
            mean_state=(self._state_count[:, None] * states).sum(axis=0) / len(self.contexts),
        )

    def token_times(self, point: NDArray[np.float64]) -> NDArray[np.float64]:
        """Time of every decode step at one hardware point, sequences one after another [T] [s]."""
        return self.token_parts(point).times

    def prefill_times(self, point: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """Time from the prompt to the first output token, one a sequence [S] [s]; None without a prefill.

        Both sides of a layer overlap. The LM head runs for the last prompt token alone.
        """
        if self.prefill is None:
            return None
        model, states = self.model, self.prefill
        prompts = self.plan.prompt_tokens.astype(np.float64)
        total = front.prefill_attention_times(point, prompts, self._attention)
        total += model.num_layers * point[place.LAYER_OVERHEAD]
        router, dense, head, shared = operators(model)
        for s, prompt in enumerate(prompts.tolist()):
            rows = np.array([router.row(model, prompt), dense.row(model, prompt), head.row(model, 1.0)])
            rows = np.vstack([rows, shared.row(model, prompt)])
            fixed = front.operator_times(point[None, :], rows)[0]
            layers = states.state_id[s]
            part = states._replace(
                state_row=np.ascontiguousarray(states.state_row[layers]),
                state_before=np.ascontiguousarray(states.state_before[layers]),
            )
            experts = kernel.state_times(point, *self._expert_shape(part), float(fixed[-1]), True)
            total[s] += fixed[:-1].sum() + experts[:, kernel.TIME].sum()
        return np.asarray(total)

    def migration_times(self, point: NDArray[np.float64]) -> NDArray[np.float64]:
        """One-off copies of hot experts to the GPU, one transfer an expert, one time a sequence [S] [s]."""
        one = kernel.copy_time(point, float(self.model.expert_bytes(self.model.expert_bits)))
        return np.asarray(self.plan.migrated_experts * one)

    def bytes_per_token(self, system: System | None = None) -> dict[str, float]:
        """Mean bytes a decode step moves, by tier; a system matters only by the group scales of its device."""
        return _bytes_per_token(self, system or self.system)

    def memory(self) -> dict[str, dict[str, float]]:
        """Bytes by device and use."""
        inputs = PlanInputs(self.model, self.system, self.replay, None)
        gpu = placement.gpu_footprint(
            self.model, self.plan.gpu_experts, inputs.max_context, buffer_bytes=self.plan.gpu_buffer_bytes
        )
        behind = placement.memory_footprint(self.model, self.plan.replica_bits)
        return {
            device: {**use._asdict(), "total": use.total}
            for device, use in (("gpu", gpu), ("ndp" if self.system.ndp else "host", behind))
        }

    @functools.cached_property
    def hit_rates(self) -> HitRates | None:
        """Hit rate of the placement with its controls, or None where the policy places nothing."""
        plan = self.plan
        if plan.hot is None or plan.alpha is None:
            return None
        return _hit_rates(self.replay.trace, plan.hot, plan.alpha, plan.norm)

    def price(self, system: System | None = None) -> Evaluation:
        """All metrics of this plan on a system (by default the one it was planned for)."""
        return _price(self, system or self.system)


def _price_point(run: Run, point: NDArray[np.float64], names: Iterable[str]) -> dict[str, float]:
    """All metrics at one hardware point."""
    token = run.token_parts(point)
    times, mean = token.times, token.mean_state
    found = {"tpot_mean_s": float(times.mean()), "decode_tok_per_s": float(1.0 / times.mean())}
    found["decode_s"] = float(times.sum() / (len(run.plan.offsets) - 1))
    found["attention_s"] = float(token.attention.mean())
    found |= {f"{part}_s": value for part, value in token.fixed.items()}
    for part, column in (("experts_gpu", kernel.PATH_GPU), ("link", kernel.PATH_LINK), ("ndp", kernel.PATH_NDP)):
        found[f"{part}_s"] = float(mean[column])
    found["busy_gpu_s"] = sum(found[f"{part}_s"] for part in ("attention", "router", "dense", "head"))
    found["busy_gpu_s"] += float(mean[kernel.BUSY_GPU])
    found["busy_link_s"], found["busy_ndp_s"] = float(mean[kernel.BUSY_LINK]), float(mean[kernel.BUSY_NDP])
    prefill = run.prefill_times(point)
    found["migration_s"] = float(run.migration_times(point).mean())
    if prefill is not None:
        found["ttft_s"] = float(prefill.mean())
        found["end_to_end_s"] = found["ttft_s"] + found["migration_s"] + found["decode_s"]
    memory = list(run.memory().values())
    found["gpu_memory_bytes"], found["offload_memory_bytes"] = (use["total"] for use in memory)
    if run.hit_rates is not None:
        found["hit_rate"] = run.hit_rates.own
    for name in names:
        percentile = percentile_of(name)
        if percentile is not None:
            found[name] = float(np.percentile(times, percentile))
    return found


def _bytes_per_token(run: Run, system: System) -> dict[str, float]:
    model, states = run.model, run.decode
    tokens = float(len(run.contexts))
    work = states.work
    count = run._work_count / tokens
    executor, bits = work[:, kernel.EXECUTOR], work[:, kernel.BITS]
    activations = 2.0 * model.hidden_size * ACTIVATION_BYTES
    weights = model.expert_params * bits / 8
    scale_bits = system.ndp.scale_bits_per_weight if system.ndp is not None else 0.0
    elements = sum(rows * cols for rows, cols in model.expert_matrices)
    on_gpu = (executor == Executor.GPU) | (executor == Executor.FETCH)
    near = executor == Executor.NDP
    copies = (executor == Executor.FETCH) * (1.0 + work[:, kernel.WASTED])
    gpu = float((count * on_gpu * (weights + activations)).sum())
    *around, shared = (op.row(model, 1.0) for op in operators(model))
    gpu += sum(row[front.REPEATS] * row[front.BYTES] for row in around)
    gpu += len(model.moe_layers) * shared[front.BYTES]
    for kind in model.attention:
        seen = run.contexts if kind.window is None else np.minimum(run.contexts, kind.window)
        kv = kind.kv_elements_per_token * ACTIVATION_BYTES * float(seen.mean())
        gpu += len(kind.layers) * (kind.params * model.bits / 8 + kv)
    return {
        "gpu_memory": gpu,
        "link_weights": float((count * copies * weights).sum()),
        "link_activations": float((count * near).sum() * activations),
        "ndp_memory": float((count * near * elements * (bits + work[:, kernel.QUANTISED] * scale_bits) / 8).sum()),
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
    """Busiest tier at its datasheet rate: no schedule of the same traffic is faster [s]."""
    moved = run.bytes_per_token(system)
    times = [
        moved["gpu_memory"] / system.gpu.memory_bandwidth_bytes_per_s,
        # Copies and activations do not contend in this model, and the two directions of activations take turns.
        max(moved["link_weights"], moved["link_activations"]) / system.link.bandwidth_bytes_per_s,
    ]
    if system.ndp is not None:
        times.append(moved["ndp_memory"] / system.ndp.dram_bandwidth_bytes_per_s)
    return max(times)


def _price(run: Run, system: System) -> Evaluation:
    if len(run.contexts) == 0:
        raise TraceError("the trace holds no decode step to price")
    if system.ndp is None and any(work.executor == Executor.NDP for work in run.plan.classes):
        raise PolicyError(
            f"the plan of {run.policy.name} runs experts on a near-data device, and system {system.name} has none"
        )
    point = hardware_point(system)
    plan = run.plan
    token = run.token_parts(point)
    times, mean = token.times, token.mean_state
    parts = {
        "attention": float(token.attention.mean()),
        "experts_gpu": float(mean[kernel.PATH_GPU]),
        "link": float(mean[kernel.PATH_LINK]),
        "ndp": float(mean[kernel.PATH_NDP]),
        **token.fixed,
    }
    breakdown = {part: parts[part] for part in PARTS}
    on_gpu = sum(breakdown[part] for part in ("attention", "router", "dense", "experts_gpu", "head"))
    by_resource = {"gpu": on_gpu, "link": parts["link"], "ndp": parts["ndp"], "overhead": parts["overhead"]}
    busy_gpu = on_gpu - parts["experts_gpu"] + float(mean[kernel.BUSY_GPU])
    prefill = run.prefill_times(point)
    migration = run.migration_times(point)
    decode = np.add.reduceat(times, plan.offsets[:-1])
    lengths = np.diff(plan.offsets)
    cosine = statistics.load_cosine(run.replay.trace) if prefill is not None else None
    metadata = run.replay.trace.metadata
    return Evaluation(
        policy=plan.policy,
        model=run.model.name,
        system=system.name,
        trace=str(metadata.get("model", "unnamed")),
        trace_source=str(metadata.get("source", "unknown")),
        prompt_tokens=float(plan.context_start.mean()),
        output_tokens=float(lengths.mean()),
        ttft_s=None if prefill is None else float(prefill.mean()),
        migration_s=float(migration.mean()),
        end_to_end_s=None if prefill is None else float((prefill + migration + decode).mean()),
        decode_s=float(decode.mean()),
        tpot_mean_s=float(times.mean()),
        **{
            f"tpot_p{q}_s": float(value)
            for q, value in zip((50, 95, 99), np.percentile(times, (50, 95, 99)), strict=True)
        },
        tpot_max_s=float(times.max()),
        decode_tok_per_s=float(1.0 / times.mean()),
        ndp_side_s=float(mean[kernel.BUSY_NDP]),
        breakdown_s=breakdown,
        busy_s={"gpu": busy_gpu, "link": float(mean[kernel.BUSY_LINK]), "ndp": float(mean[kernel.BUSY_NDP])},
        bytes_per_token=run.bytes_per_token(system),
        memory_bytes=run.memory(),
        bandwidth_floor_s=_floor(run, system),
        binding_resource=max(by_resource, key=by_resource.__getitem__),
        hit_rate=run.hit_rates,
        prefill_decode_cosine=None if cosine is None else tuple(float(c) for c in cosine),
        weakest_source=system.weakest_source(),
        notes=(*run.replay.notes, *plan.notes, *system.flags),
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
    replay = recorded if isinstance(recorded, Replay) else make_replay(network, recorded, prompt, output, layers)
    if not replay.trace.has_decode:
        raise TraceError("the trace holds no decode step in some sequence, and decode is what is priced")
    plan = rule.plan(PlanInputs(network, machine, replay, losses))
    return Run(network, machine, replay, rule, plan)


def make_replay(
    model: MoEModel,
    trace: RoutingTrace,
    prompt: int | None = None,
    output: int | None = None,
    layers: Literal["cycle"] | None = None,
) -> Replay:
    """Fit a trace to a model and a workload: layers mapped, prompts and outputs truncated or cycled."""
    if trace.num_experts_inferred and trace.num_experts <= model.num_experts:
        trace = trace.with_num_experts(model.num_experts)
    trace.check_model(model)
    return trace.replay(prompt, output, model.moe_layers, layers, model.name)


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
    losses : loss table of the bitwidth search; by default the bundled measured one where its expert count fits,
        else one proportional to ``4**-bits`` (assumed).
    layers : ``"cycle"`` to replay a trace with another number of layers.

    Raises
    ------
    TraceError : the trace does not fit the model or the policy's needs.
    PolicyError : bad options, or a system without what the policy needs.
    PlacementError : weights that do not fit in memory.
    """
    return plan_run(model, system, trace, policy, prompt=prompt, output=output, losses=losses, layers=layers).price()


__all__ = ["PARTS", "Evaluation", "HitRates", "Run", "evaluate", "make_replay", "plan_run"]
