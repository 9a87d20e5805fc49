"""The slow, plain evaluation: every pick of every layer of every token, one after another.

It shares no arithmetic with `evaluate`: the formulas come from ``reference.py``, nothing is compressed, and every
sum is written out. Use it to check the point that matters (``perfmodel compare --check``).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from perfmodel import reference
from perfmodel.bitwidth import losses_for
from perfmodel.evaluation import PARTS, RESOURCES, Evaluation
from perfmodel.hardware import EngineSpec, System
from perfmodel.operators import ATTENTION_LAUNCHES, DENSE_LAUNCHES, HEAD_LAUNCHES, ROUTER_LAUNCHES
from perfmodel.point import dram_efficiency
from perfmodel.policies import Executor, Plan, When, WorkClass
from perfmodel.run import Run

_ACTIVATION_BYTES = 2


class _Machine:
    """The costs of single operations on one system, from the reference formulas."""

    def __init__(self, run: Run, system: System) -> None:
        self.model, self.system = run.model, system
        gpu, engine = system.gpu, system.engine
        overhead = gpu.layer_overhead_s
        self.launch_s = gpu.launch_overhead_s if overhead is None and engine is None else 0.0
        self.gpu_flops = gpu.effective_flops_per_s("fp16")
        self.gpu_rate = self.expert_rate = gpu.effective_memory_bandwidth_bytes_per_s
        self.n_half = self.expert_n_half = gpu.memory_n_half_bytes
        self.expert_launch_s = self.launch_s
        self.link_rate = system.link.effective_bandwidth_bytes_per_s
        self.tile = 0.0
        if system.cpu is not None:
            self.cpu_rate = system.cpu.effective_dram_bandwidth_bytes_per_s
            self.cpu_flops = system.cpu.effective_flops_per_s()
            self.cpu_vector_flops = system.cpu.effective_vector_flops_per_s
            self.cpu_tile = system.cpu.tile_rows or 1
            self.cpu_pack = system.cpu.effective_pack_bytes_per_s
        # The reference walks through every fold, so the same work is timed once.
        self.expert_on_gpu = functools.cache(self._expert_on_gpu)
        self.expert_near_memory = functools.cache(self._expert_near_memory)
        self.expert_on_cpu = functools.cache(self._expert_on_cpu)
        self.round_trip_s = 0.0 if system.host is None else system.host.round_trip_s
        self.copy_overhead_s = 0.0 if system.host is None else system.host.copy_overhead_s
        if engine is not None:
            self._under(engine)
        # Where attention and the rest of the network around the experts run: [flop/s], [byte/s], [byte], [s].
        rates = {"gpu": (self.gpu_flops, self.gpu_rate, self.n_half, self.launch_s)}
        if system.cpu is not None:
            flops = max(self.cpu_flops, self.cpu_vector_flops)
            rates["cpu"] = (flops, self.cpu_rate, 0.0, 0.0)
        self.at_attention, self.at_trunk = rates[run.plan.attention_on], rates[run.plan.trunk_on]

    def _under(self, engine: EngineSpec) -> None:
        """Replace what the devices reach by what an engine reaches of them."""
        gpu, cpu = self.system.gpu, self.system.cpu
        together = gpu.devices if gpu.split == "tensor" else 1
        peak = gpu.memory_bandwidth_gb_per_s * 1e9 * together
        self.gpu_flops = gpu.peak_tflop_per_s["fp16"] * 1e12 * together * engine.compute_efficiency
        self.gpu_rate = peak * engine.memory_efficiency
        self.expert_rate = peak * (engine.expert_efficiency or engine.memory_efficiency)
        self.n_half = engine.memory_n_half_kb * 1e3 * together
        self.expert_n_half = self.n_half if engine.experts == "single" else 0.0
        self.expert_launch_s = engine.kernel_us * 1e-6 if engine.experts == "single" else 0.0
        if engine.copies == "pageable" and engine.pageable_gb_per_s is not None:
            self.link_rate = min(self.link_rate, engine.pageable_gb_per_s * 1e9)
        # A processor that was measured with experts keeps what it reached.
        cpu = None if cpu is None or cpu.rates == "reached" else cpu
        if cpu is not None and engine.cpu_efficiency is not None:
            slower = cpu.model_copy(update={"dram_efficiency": engine.cpu_efficiency})
            self.cpu_rate = slower.effective_dram_bandwidth_bytes_per_s
        if cpu is not None and engine.cpu_compute_efficiency is not None:
            change = engine.cpu_compute_efficiency / cpu.compute_efficiency
            self.cpu_flops, self.cpu_vector_flops = self.cpu_flops * change, self.cpu_vector_flops * change
        if cpu is not None and engine.cpu_units == "vector" and cpu.vector_tflop_per_s is not None:
            self.cpu_flops, self.cpu_vector_flops, self.cpu_tile = self.cpu_vector_flops, 0.0, 1
            self.cpu_pack = 0.0
        self.tile = engine.expert_tile_tokens or 0
        if engine.round_trip_us is not None:
            self.round_trip_s = engine.round_trip_us * 1e-6
        if engine.copy_overhead_us is not None:
            self.copy_overhead_s = engine.copy_overhead_us * 1e-6

    def fixed(self, tokens: float, sequences: float = 1) -> float:
        """What a step or pass of so many tokens costs whatever its work is, with its sequences [s]."""
        gpu, engine = self.system.gpu, self.system.engine
        if engine is None:
            return self.model.num_layers * (0.0 if gpu.layer_overhead_s is None else gpu.layer_overhead_s)
        together = gpu.devices if gpu.split == "tensor" else 1
        total = engine.step_us * 1e-6 + engine.step_kernels * engine.kernel_us * 1e-6
        total += sequences * engine.sequence_us * 1e-6
        for mixer in self.model.attention:
            plain = not mixer.recurrent_elements and not mixer.convolution_elements
            kernels = engine.attention_kernels if plain else engine.recurrent_kernels
            for _ in mixer.layers:
                total += kernels * engine.kernel_us * 1e-6
                if together > 1:
                    own = gpu.peer_bandwidth_gb_per_s is not None
                    total += 2 * (engine.peer_all_reduce_us if own else engine.all_reduce_us) * 1e-6
        if together > 1:
            link = self.system.link.effective_bandwidth_bytes_per_s
            peer = link if gpu.peer_bandwidth_gb_per_s is None else gpu.peer_bandwidth_gb_per_s * 1e9
            reduced = tokens * self.model.hidden_size * _ACTIVATION_BYTES
            total += 2 * self.model.num_layers * reduced * 2 * (together - 1) / together / peer
        for network in self.model.feed_forward:
            for _ in network.layers:
                if network.name == "dense":
                    total += engine.dense_kernels * engine.kernel_us * 1e-6
                if network.experts is None:
                    continue
                total += engine.expert_kernels * engine.kernel_us * 1e-6
                if engine.experts == "grouped":
                    for _ in network.experts.matrices:
                        total += self.n_half / self.expert_rate
                if engine.batched_from_tokens is not None and tokens >= engine.batched_from_tokens:
                    total += (engine.batched_layer_us or 0.0) * 1e-6
        return total

    def transfer(self, size: float) -> float:
        """Time of one copy over the link [s]."""
        link = self.system.link
        return float(reference.transfer_time(size, self.link_rate, link.latency_s, link.n_half_bytes))

    def copy(self, bits: float) -> float:
        """Time of one copy of an expert over the link [s]."""
        return self.copy_overhead_s + self.transfer(self.model.expert_params * bits / 8)

    def operator(
        self,
        params: float,
        tokens: float,
        bits: float,
        launches: int,
        at: tuple[float, float, float, float],
        kernels: int = 1,
    ) -> float:
        """Time of one operator that reads its weights once, at the rates of where it runs [s]."""
        if params == 0:
            return 0.0
        flops, rate, n_half, launch_s = at
        moved = params * bits / 8 + 2 * tokens * self.model.hidden_size * _ACTIVATION_BYTES
        work = 2 * tokens * params
        return float(reference.roofline_time(work, moved, flops, rate, n_half * kernels, launches * launch_s))

    def _expert_on_gpu(self, tokens: int, bits: float) -> float:
        """Time of one expert on the GPU [s]."""
        matrices = len(self.model.expert_matrices)
        # Tokens that only fill up a tile are computed and not moved.
        padded = max(self.tile, tokens + self.tile / 2) if self.tile and tokens > 8 else tokens
        flops = self.gpu_flops * tokens / padded
        at = flops, self.expert_rate, self.expert_n_half, self.expert_launch_s
        return self.operator(self.model.expert_params, tokens, bits, matrices, at, matrices)

    def _expert_on_cpu(self, tokens: int, bits: float) -> float:
        """Time of one expert on the host [s]."""
        cpu = self.system.cpu
        assert cpu is not None
        return float(
            reference.cpu_expert_time(
                tokens,
                self.model.expert_params,
                self.model.expert_params * bits / 8,
                self.model.hidden_size,
                self.cpu_flops,
                self.cpu_vector_flops,
                self.cpu_tile,
                self.cpu_rate,
                cpu.expert_overhead_s,
                self.cpu_pack,
            )
        )

    def _expert_near_memory(self, tokens: int, work: WorkClass) -> float:
        """Time of one expert on the near-data device, without the link [s]."""
        ndp = self.system.ndp
        assert ndp is not None
        if ndp.precision_scaling == "linear":
            rate = 16 / work.bits
        elif ndp.precision_scaling == "native":
            rate = ndp.array_rate(math.floor(work.bits)) if work.bits < 33 else 1.0
        else:
            rate = 1.0
        stored = work.bits + (ndp.scale_bits_per_weight if work.quantised else 0.0)
        codes = {"os": 0, "ws": 1, "is": 2}
        return math.fsum(
            float(
                reference.gemm_time(
                    tokens,
                    inputs,
                    outputs,
                    stored,
                    ndp.rows,
                    ndp.cols,
                    ndp.arrays,
                    ndp.clock_hz,
                    codes[ndp.dataflow],
                    rate,
                    ndp.dram_bandwidth_bytes_per_s * dram_efficiency(ndp),
                )
            )
            for inputs, outputs in self.model.expert_matrices
        )

    def attention(self, formula: Callable[..., Any], tokens: float, states: float = 1) -> float:
        """Attention of all layers, by the decode or the prefill formula [s]; ``states`` are read and written."""
        total = 0.0
        rate_flops, rate_bytes, n_half, launch = self.at_attention
        for kind in self.model.attention:
            # A constant state is read and written once a step; its update and its use are two products an element.
            state = 2 * (4 * kind.recurrent_elements + 2 * kind.convolution_elements)
            weights = kind.params * self.model.storage.attention.bits / 8 + states * state
            flops = 2 * kind.params + 4 * kind.recurrent_elements
            launch_s = ATTENTION_LAUNCHES * launch if kind.tensors else 0.0
            for cache in kind.caches or (None,):
                window, work, moved = _of_context(cache, self.model.cached_bits)
                one = float(
                    formula(
                        tokens,
                        window,
                        flops,
                        weights,
                        work,
                        moved,
                        rate_flops,
                        rate_bytes,
                        n_half,
                        launch_s,
                    )
                )
                for _ in kind.layers:
                    total += one
                flops, weights, launch_s = 0, 0.0, 0.0
        return total

    def around(self, tokens: float, last: float = 1) -> dict[str, float]:
        """Routers, dense networks and head of all layers, and the shared experts of one MoE layer [s]."""
        model, stored = self.model, self.model.storage
        parts = {"router": 0.0, "dense": 0.0, "shared": 0.0}
        for kind in model.feed_forward:
            count = len(kind.layers)
            at = self.at_trunk
            router = self.operator(_params(kind.router), tokens, stored.router.bits, ROUTER_LAUNCHES, at)
            dense = self.operator(_params(kind.dense), tokens, stored.dense.bits, DENSE_LAUNCHES, at)
            shared = self.operator(_params(kind.shared), tokens, stored.shared.bits, DENSE_LAUNCHES, at)
            parts["router"] += count * router
            parts["dense"] += count * dense
            parts["shared"] += count * shared / len(model.moe_layers)
        parts["head"] = self.operator(model.head_params, last, stored.head.bits, HEAD_LAUNCHES, self.at_trunk)
        return parts


def _params(tensors: Iterable[Any]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _of_context(cache: Any, bits: float) -> tuple[float, float, float]:
    """Tokens of context that count at most, and work and traffic of each."""
    if cache is None:
        return 0.0, 0.0, 0.0
    groups = cache.tokens_per_entry
    most = math.inf if cache.window is None else cache.window
    picked = math.inf if cache.read_entries is None else cache.read_entries * groups
    return min(most, picked), cache.flops_per_entry / groups, cache.elements * bits / 8 / groups


class _Layer:
    """The sides of one layer, filled pick by pick."""

    def __init__(self, plan: Plan, shared_s: float) -> None:
        self.plan = plan
        self.link = self.link_ahead = self.link_behind = self.ndp_link = self.ndp = 0.0
        self.gpu = shared_s if plan.trunk_on == "gpu" else 0.0
        self.cpu = shared_s if plan.trunk_on == "cpu" else 0.0
        self.cpu_behind = self.crossing = self.host = 0.0
        # Copies that the layer waits for, with class and tokens, the computing that follows each, and how many.
        self.queue: list[tuple[int, int, float, float, float]] = []

    def add(self, machine: _Machine, number: int, tokens: int, count: float = 1) -> None:
        """Add the work of one expert, or of so many alike."""
        work = self.plan.classes[number]
        if work.executor == Executor.SKIP or tokens == 0:
            return
        if work.executor == Executor.NDP:
            self.ndp_link += count * 2 * machine.transfer(tokens * machine.model.hidden_size * _ACTIVATION_BYTES)
            self.ndp += count * machine.expert_near_memory(tokens, work)
            return
        if work.executor == Executor.CPU:
            seconds = count * machine.expert_on_cpu(tokens, work.bits)
            if work.when == When.BEHIND:
                self.cpu_behind += seconds
            else:
                self.cpu += seconds
            return
        computing = 0.0 if work.executor == Executor.COPY else machine.expert_on_gpu(tokens, work.bits)
        self.gpu += count * computing
        if work.executor == Executor.GPU:
            return
        copy = machine.copy(work.bits)
        if work.when == When.AHEAD:
            self.link_ahead += count * copy
        elif work.when == When.BEHIND:
            self.link_behind += count * copy
        else:
            self.link += count * copy
            self.queue.append((number, tokens, copy, computing, count))

    def add_host(self, machine: _Machine, numbers: Iterable[int], tokens: float) -> None:
        """Add the host's part: round trips, and the activations of the whole layer sent once."""
        used = {self.plan.classes[number].executor for number in numbers}
        trips = self.plan.round_trips
        if trips == "layer" or (trips == "cpu" and Executor.CPU in used):
            self.host = machine.round_trip_s
        away = {Executor.CPU} if self.plan.trunk_on == "gpu" else {Executor.GPU, Executor.FETCH}
        sent = tokens * (bool(used & away) + (self.plan.attention_on != self.plan.trunk_on))
        self.crossing = 2 * machine.transfer(sent * machine.model.hidden_size * _ACTIVATION_BYTES)

    def gpu_side(self) -> float:
        """Copies waited for, and computing [s]."""
        if self.plan.fetch == "before":
            return self.link + self.gpu
        # Residents first, then every expert when it has been copied, one after another.
        queue = sorted(self.queue, key=lambda item: (item[0], -item[1], -item[4]))
        if any(count != 1 for *_, count in queue):
            return max(self.gpu, *self._ends(queue))
        done = self.gpu - math.fsum(computing for *_, computing, _ in queue)
        copied = 0.0
        for *_, copy, computing, _ in queue:
            copied += copy
            done = max(done, copied) + computing
        return done

    def _ends(self, queue: list[tuple[int, int, float, float, float]]) -> Iterable[float]:
        """When all is computed if it waits for the first, or for the last, of several copies alike [s]."""
        for i, (_, _, copy, computing, count) in enumerate(queue):
            before = math.fsum(item[4] * item[2] for item in queue[:i])
            after = math.fsum(item[4] * item[3] for item in queue[i + 1 :])
            one = min(1, count)
            yield before + one * copy + count * computing + after
            yield before + count * copy + one * computing + after

    def sides(self, overlap: str) -> float:
        """How long the layer's own work takes [s]."""
        times = (self.gpu_side(), self.ndp_link + self.ndp, self.cpu)
        return max(times) if overlap == "max" else sum(times)

    def path(self, before: "_Layer | None", overlap: str, attention_s: float) -> dict[str, float]:
        """What is on the critical path, by part [s]."""
        waiting, window, late = self.link_ahead, 0.0, 0.0
        if before is not None:
            waiting += before.link_behind
            until = before.sides(overlap) + attention_s
            window = until - before.link
            late = max(0.0, before.cpu + before.cpu_behind - until)
        link = self.gpu_side() - self.gpu + max(0.0, waiting - window)
        sides = (
            {"link": link, "experts_gpu": self.gpu},
            {"link": self.ndp_link, "ndp": self.ndp},
            {"cpu": self.cpu + late},
        )
        chosen = sides if overlap == "sum" else (max(sides, key=lambda side: sum(side.values())),)
        found = dict.fromkeys(("link", "experts_gpu", "ndp", "cpu", "overhead"), 0.0)
        for side in chosen:
            for part, seconds in side.items():
                found[part] += seconds
        found["link"] += self.crossing
        found["overhead"] += self.host
        return found


def per_pick(run: Run, system: System | None = None) -> dict[str, Any]:
    """Every timed metric of ``run.price(system)``, by the plain loop; the same names, None for the same absences.

    Meant for small traces and for spot checks: it takes about 10 microseconds a pick.
    """
    machine = _Machine(run, system or run.system)
    model, plan = run.model, run.plan
    size, sequences = run.batch.tokens, run.batch.sequences
    overheads = machine.fixed(size, sequences) if plan.trunk_on == "gpu" else 0.0
    fixed = machine.around(size, size) | {"overhead": overheads}
    shared = fixed.pop("shared")
    tokens: list[float] = []
    decode: list[float] = []
    # Kept as lists and added exactly at the end: a running sum over a long trace would lose digits.
    sums: dict[str, list[float]] = {part: [] for part in PARTS}
    busy: dict[str, list[float]] = {one: [] for one in RESOURCES}

    def attend(context: float, window: float, flops: float, weights: float, work: float, moved: float, *at: Any) -> Any:
        more = size * flops, weights, size * work, sequences * moved
        return reference.decode_attention_time(context, window, *more, *at)

    for s in range(len(plan.offsets) - 1):
        first = len(tokens)
        for t in range(int(plan.offsets[s]), int(plan.offsets[s + 1]), size):
            parts = dict.fromkeys(PARTS, 0.0) | fixed
            attention = machine.attention(attend, _context(run, s, t), sequences)
            parts["attention"] = attention
            before = None
            copied: list[float] = []
            on_cpu: list[float] = []
            for at in range(plan.picks.shape[1]):
                layer = _Layer(plan, shared)
                work = _step_work(run, t, at)
                for number, count in work:
                    layer.add(machine, number, count)
                layer.add_host(machine, [number for number, _ in work], size)
                for part, value in layer.path(before, plan.overlap, attention / model.num_layers).items():
                    parts[part] += value
                before = layer
                busy["gpu"].append(layer.gpu)
                busy["link"].append(layer.link + layer.link_ahead + layer.link_behind + layer.ndp_link + layer.crossing)
                busy["ndp"].append(layer.ndp)
                busy["cpu"].append(layer.cpu + layer.cpu_behind)
                copied.append(layer.link + layer.link_ahead + layer.link_behind + layer.crossing)
                on_cpu.append(layer.cpu + layer.cpu_behind)
            # A step takes no less than the CPU, or the link, needs for all of it; near-data transfers overlap copies.
            needs = {"link": math.fsum(copied), "cpu": math.fsum(on_cpu)}
            needs["cpu"] += parts["attention"] if plan.attention_on == "cpu" else 0.0
            needs["cpu"] += parts["router"] + parts["dense"] + parts["head"] if plan.trunk_on == "cpu" else 0.0
            busiest = max(("cpu", "link"), key=needs.__getitem__)
            parts[busiest] += max(0.0, needs[busiest] - math.fsum(parts.values()))
            busy[plan.attention_on].append(parts["attention"])
            busy[plan.trunk_on] += [parts[part] for part in ("router", "dense", "head")]
            tokens.append(math.fsum(parts.values()))
            for part in PARTS:
                sums[part].append(parts[part])
        decode.append(math.fsum(tokens[first:]))
    prefill = _prefill(machine, run)
    expert = machine.copy(model.expert_bits)
    migration = [float(count) * expert for count in plan.migrated_experts]
    count = len(tokens)
    mean = math.fsum(tokens) / count
    result: dict[str, Any] = {
        "ttft_s": None if prefill is None else sum(prefill) / len(prefill),
        "migration_s": sum(migration) / len(migration),
        "decode_s": sum(decode) / len(decode),
        "end_to_end_s": None,
        "tpot_mean_s": mean,
        "tpot_max_s": max(tokens),
        "decode_tok_per_s": size / mean,
        "ndp_side_s": math.fsum(busy["ndp"]) / count,
        "breakdown_s": {part: math.fsum(values) / count for part, values in sums.items()},
        "busy_s": {part: math.fsum(values) / count for part, values in busy.items()},
        "bytes_per_token": _bytes(machine, run),
    }
    result |= _quality(run)
    for q in (50, 95, 99):
        result[f"tpot_p{q}_s"] = float(np.percentile(tokens, q))
    if prefill is not None:
        totals = [a + b + c for a, b, c in zip(prefill, migration, decode, strict=True)]
        result["end_to_end_s"] = sum(totals) / len(totals)
    return result


def _context(run: Run, sequence: int, first: int) -> float:
    """Mean context of the tokens of the step that begins with token ``first`` of a plan, themselves included."""
    plan, size = run.plan, run.batch.tokens
    step, start = (first - int(plan.offsets[sequence])) // size, float(plan.context_start[sequence])
    if run.batch.of == "sequences":
        return start + step + 1
    return sum(start + step * size + token + 1 for token in range(size)) / size


def _step_work(run: Run, first: int, layer: int) -> list[tuple[int, int]]:
    """Class and tokens of everything that one layer runs in the step that begins with token ``first``."""
    plan, size = run.plan, run.batch.tokens
    copies = [] if plan.copies is None else plan.copies[first : first + size, layer].ravel().tolist()
    if size == 1:
        return [(number, 1) for number in plan.picks[first, layer].tolist() + copies]
    # An expert runs once in each stored form, as the first pick of the step says, with every token that picked it.
    found: dict[tuple[int, float, bool], list[int]] = {}
    for t in range(first, first + size):
        for expert, number in zip(run.replay.decode_ids[t, layer].tolist(), plan.picks[t, layer].tolist(), strict=True):
            work = plan.classes[number]
            if work.executor != Executor.SKIP:
                found.setdefault((expert, work.bits, work.quantised), [number, 0])[1] += 1
    return [(number, count) for number, count in found.values()] + [(number, 1) for number in copies]


#: Below this share of the sum of their kind, parts differ by rounding alone: some are differences of longer times.
_ROUNDING = 1e-14


def largest_difference(evaluation: Evaluation, checked: dict[str, Any]) -> float:
    """Largest relative difference between an evaluation and the plain loop, over every number of both [1]."""

    def difference(one: Any, other: Any, rounding: float = 0.0) -> float:
        if isinstance(other, dict):
            rounding = _ROUNDING * sum(map(abs, other.values()))
            return max(difference(one[key], value, rounding) for key, value in other.items())
        if one is None or other is None:
            return 0.0 if one is other else math.inf
        if one == other or abs(one - other) <= rounding:
            return 0.0
        relative = abs(one - other) / max(abs(one), abs(other))
        return float(relative) if math.isfinite(relative) else math.inf

    return max(difference(getattr(evaluation, name), value) for name, value in checked.items())


def _prefill(machine: _Machine, run: Run) -> list[float] | None:
    plan = run.plan
    if plan.prefill_tokens is None or plan.prefill_class is None:
        return None
    times = []
    for s, prompt in enumerate(plan.prompt_tokens.tolist()):
        passes = 1 if run.micro_batch is None else math.ceil(prompt / run.micro_batch)
        if passes > 1 or run.batch.sequences > 1:
            times.append(passes * _mean_pass(machine, run, s, passes))
            continue
        total = machine.attention(reference.prefill_attention_time, prompt)
        around = machine.around(prompt)
        shared = around.pop("shared")
        total += sum(around.values())
        if plan.trunk_on == "gpu":
            total += machine.fixed(prompt)
        for classes, counts in zip(plan.prefill_class[s], plan.prefill_tokens[s], strict=True):
            layer = _Layer(plan, shared)
            chosen = [(n, count) for n, count in zip(classes.tolist(), counts.tolist(), strict=True) if count]
            for number, count in chosen:
                layer.add(machine, number, count)
            layer.add_host(machine, [number for number, _ in chosen], prompt)
            total += sum(layer.path(None, "max", 0.0).values())
        times.append(total)
    return times


def _mean_pass(machine: _Machine, run: Run, s: int, passes: int) -> float:
    """Time of the mean of so many equal passes over the prompts of one prefill [s]."""
    plan = run.plan
    assert plan.prefill_tokens is not None
    assert plan.prefill_class is not None
    together = int(plan.prompt_tokens[s])
    prompts = [together] if run.replay.members is None else run.replay.members[s].tolist()
    reached = [max(1, math.ceil(Fraction(prompt * passes, max(1, together)))) for prompt in prompts]

    def attend(_: float, window: float, flops: float, weights: float, work: float, moved: float, *at: Any) -> float:
        arithmetic = read = 0.0
        for prompt, count in zip(prompts, reached, strict=True):
            arithmetic += prompt * flops + reference.causal_pairs(prompt, window) * work
            read += prompt + sum(min(i * prompt / count, window) for i in range(count))
        return reference.roofline_time(arithmetic / passes, weights + moved * read / passes, *at)

    total = machine.attention(attend, together, sum(reached) / passes)
    around = machine.around(together / passes, len(prompts))
    shared = around.pop("shared")
    total += around["router"] + around["dense"] + around["head"] / passes
    if plan.trunk_on == "gpu":
        total += machine.fixed(together / passes, len(prompts) / passes)
    for classes, counts in zip(plan.prefill_class[s].tolist(), plan.prefill_tokens[s].tolist(), strict=True):
        layer = _Layer(plan, shared)
        used = [(number, count) for number, count in zip(classes, counts, strict=True) if count]
        for number, count in used:
            visits = passes * (1 - (1 - 1 / passes) ** count)
            fewer = math.floor(count / visits)
            more = count / visits - fewer
            layer.add(machine, number, fewer, visits * (1 - more) / passes)
            layer.add(machine, number, fewer + 1, visits * more / passes)
        layer.add_host(machine, [number for number, _ in used], together / passes)
        total += sum(layer.path(None, "max", 0.0).values())
    return total


def _quality(run: Run) -> dict[str, float | None]:
    """Expected quantisation loss, pick by pick."""
    model, plan = run.model, run.plan
    picks: list[tuple[int, int, WorkClass]] = []
    for experts, numbers in zip(run.replay.decode_ids, plan.picks, strict=True):
        for layer in range(len(experts)):
            for expert, number in zip(experts[layer].tolist(), numbers[layer].tolist(), strict=True):
                if expert < model.num_experts:
                    picks.append((layer, expert, plan.classes[number]))
    widths = [w.bits for _, _, w in picks if w.executor != Executor.SKIP and w.bits < model.expert_bits]
    if not widths and all(work.executor != Executor.SKIP for _, _, work in picks):
        return {"quant_loss": 0.0, "quant_loss_vs_uniform": None, "quant_noise": 0.0}
    table = losses_for(run.losses, model)
    mean_bits = plan.mean_bits or math.fsum(widths) / max(1, len(widths))
    lost, uniform, variance = [], [], []
    for layer, expert, work in picks:
        whole = math.nan if table.output_variance is None else float(table.output_variance[layer, expert])
        by_width = dict(zip(table.bits, table.losses[layer, expert].tolist(), strict=True))
        variance.append(whole)
        if work.executor == Executor.SKIP:
            lost.append(whole)
            uniform.append(whole)
        elif work.bits < model.expert_bits:
            lost.append(by_width.get(int(work.bits), math.nan) if work.bits.is_integer() else math.nan)
            uniform.append(float(np.interp(mean_bits, list(by_width), list(by_width.values()), math.nan, math.nan)))

    def ratio(below: list[float]) -> float | None:
        value = math.fsum(lost) / math.fsum(below) if math.fsum(below) > 0 else math.nan
        return None if math.isnan(value) else value

    mean = math.fsum(lost) / len(picks)
    return {
        "quant_loss": None if math.isnan(mean) else mean,
        "quant_loss_vs_uniform": ratio(uniform) if widths else None,
        "quant_noise": ratio(variance),
    }


def _bytes(machine: _Machine, run: Run) -> dict[str, float]:
    """Mean bytes of a decode step by tier, pick by pick, for each of its tokens."""
    model, plan = run.model, run.plan
    ndp = machine.system.ndp
    activation = 2 * model.hidden_size * _ACTIVATION_BYTES
    size = run.batch.tokens
    tiers = ("gpu_memory", "link_weights", "link_activations", "ndp_memory", "cpu_memory")
    moved: dict[str, list[float]] = {tier: [] for tier in tiers}
    around, of_attention = moved[f"{plan.trunk_on}_memory"], moved[f"{plan.attention_on}_memory"]
    away = {Executor.CPU} if plan.trunk_on == "gpu" else {Executor.GPU, Executor.FETCH}
    steps = 0
    stored = model.storage
    every: list[tuple[int, float, int]] = [(model.head_params, stored.head.bits, 1)]
    for ffn in model.feed_forward:
        parts = ((ffn.router, stored.router), (ffn.dense, stored.dense), (ffn.shared, stored.shared))
        every += [(_params(tensors), form.bits, len(ffn.layers)) for tensors, form in parts]
    for s in range(len(plan.offsets) - 1):
        for t in range(int(plan.offsets[s]), int(plan.offsets[s + 1]), size):
            steps += 1
            context = _context(run, s, t)
            for params, bits, count in every:
                around.append(count * (params * bits / 8 + size * activation) if params else 0.0)
            for kind in model.attention:
                state = 2 * (4 * kind.recurrent_elements + 2 * kind.convolution_elements)
                weights = kind.params * stored.attention.bits / 8 + run.batch.sequences * state
                for cache in kind.caches:
                    window, _, each = _of_context(cache, model.cached_bits)
                    weights += run.batch.sequences * min(context, window) * each
                of_attention.append(len(kind.layers) * weights)
            every_work = [_step_work(run, t, at) for at in range(plan.picks.shape[1])]
            for done in every_work:
                crossed = any(plan.classes[number].executor in away for number, _ in done)
                moved["link_activations"].append(size * activation * (crossed + (plan.attention_on != plan.trunk_on)))
            for number, count in itertools.chain.from_iterable(every_work):
                work = plan.classes[number]
                weights = model.expert_params * work.bits / 8
                if work.executor in (Executor.GPU, Executor.FETCH):
                    moved["gpu_memory"].append(weights + count * activation)
                if work.executor in (Executor.FETCH, Executor.COPY):
                    moved["link_weights"].append(weights)
                if work.executor == Executor.CPU:
                    moved["cpu_memory"].append(weights + count * activation)
                if work.executor == Executor.NDP:
                    scales = ndp.scale_bits_per_weight if ndp is not None and work.quantised else 0.0
                    elements = sum(a * b for a, b in model.expert_matrices)
                    moved["link_activations"].append(count * activation)
                    moved["ndp_memory"].append(elements * (work.bits + scales) / 8)
    return {tier: math.fsum(values) / (steps * size) for tier, values in moved.items()}
