"""What the model says of a measured run: its machine, its engine, and its step told by counts.

A run names a model, a machine, an engine and where the experts were; nothing of it enters the prediction but these and
its counters (misses, copies, different experts), never its speed. Machines are the bundled specs; the engine is the
profile of its name, or the default profile of its kind where it has none (`PROFILES`).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.measured import MeasuredRun
from perfmodel.hardware import CpuSpec, EngineSpec, GpuSpec, LinkSpec, Source, System, load_spec
from perfmodel.model import MoEModel
from perfmodel.point import Points, hardware_point
from perfmodel.policies import Executor, When
from perfmodel.steps import Experts, Layers, Prefill, PricedPrefill, PricedStep, Step, binomial_layers, mean_tokens
from perfmodel.storage import Storage

#: Engines without a profile of their own, and the default profile of their kind.
PROFILES = {
    "llama-cpp-cuda-2025": "llama-cpp-cuda",
    "llama-cpp-rocm": "llama-cpp-cuda",
    "llama-cpp-metal": "llama-cpp-cuda",
    "mlx": "llama-cpp-cuda",
    "sglang": "vllm",
    "imp": "llama-cpp-cuda",
    "sparkinfer": "llama-cpp-cuda",
    "tritonllm": "moe-infinity",
    "accelerate": "moe-infinity",
    "deepspeed": "moe-infinity",
    "mixtral-offloading": "moe-infinity",
    "hybrimoe": "fiddler",
}
#: How unevenly experts are visited: a law of popularity ``rank ** -ZIPF`` whose union over 16 tokens is the measured
#: 59.2 of 128 experts (Qwen3-30B-A3B, concurrent requests, shijiuzhang/moe-cache-eval).
ZIPF = 0.85

#: Rate of copies from pageable memory: 8 to 10 GB/s on three machines (toyaix/tritonllm PR 41, kekzl/imp PR 1409).
PAGEABLE_GB_PER_S = 9.0


class Predicted(NamedTuple):
    """A run that counts, ready to be priced.

    quantity : ``decode`` or ``prefill``. measured : tokens per second [token/s]. tokens : that one priced time yields.
    """

    run: MeasuredRun
    quantity: str
    system: System
    priced: PricedStep | PricedPrefill
    tokens: float
    measured: float

    def rates(self, points: Points) -> NDArray[np.float64]:
        """Tokens per second at every hardware point [N] [token/s]."""
        return self.tokens / self.priced.times(points)

    def rate(self) -> float:
        """Tokens per second on the run's own system [token/s]."""
        return float(self.rates(Points.one(hardware_point(self.system)))[0])


@functools.cache
def _popularity(experts: int, top_k: int) -> NDArray[np.float64]:
    """Chance of each expert to be among those of a token [E], by the law above; none above 1."""
    chance = np.arange(1, experts + 1, dtype=np.float64) ** -ZIPF
    chance *= top_k / chance.sum()
    while chance.max() > 1.0:
        full = chance >= 1.0
        rest = chance[~full]
        chance[full] = 1.0
        chance[~full] = rest * ((top_k - full.sum()) / rest.sum())
    return chance


#: Tokens of one real text that visit as many different experts as so many tokens at random would: measured unions of
#: 29.0, 52.8 and 75.2 of 128 experts over 8, 32 and 128 tokens (Qwen3-30B-A3B, everett6/moe-prefetch
#: artifacts/r6_prefill_union.json), put through E (1 - (1 - k / E)^n). Beyond them in proportion to the logarithms.
_TEXT = ((1.0, 8.0, 32.0, 128.0, 512.0), (1.0, 3.98, 8.24, 13.7, 22.8))


def distinct_experts(model: MoEModel, tokens: float, of_text: bool = False) -> float:
    """Different experts that so many tokens visit in one layer [1].

    By the law of popularity above, or for consecutive tokens of one real text by what was measured. Never above
    ``min(E, k * tokens)``, and ``k`` for one token.
    """
    count, top_k = model.num_experts, model.top_k
    if tokens <= 1.0:
        return float(top_k)
    if of_text:
        alike = math.exp(float(np.interp(math.log(tokens), np.log(_TEXT[0]), np.log(_TEXT[1]))))
        return float(min(-count * math.expm1(alike * math.log1p(-top_k / count)) if top_k < count else count, count))
    visited = -np.expm1(tokens * np.log1p(-np.minimum(_popularity(count, top_k), 1.0 - 1e-12)))
    return float(min(visited.sum(), count, top_k * tokens))


@functools.cache
def _device(name: str) -> object:
    return load_spec(name)


def profile_of(run: MeasuredRun) -> str:
    """Name of the profile that a run is predicted with: its engine's, or the default one of its kind."""
    return PROFILES.get(str(run.engine), str(run.engine))


def residency(run: MeasuredRun) -> str:
    """Where the experts of a run are: ``resident``, ``cpu``, ``cached`` (misses on the CPU), or ``fetched``."""
    if run.gpu_experts == 1.0:
        return "resident"
    if run.elsewhere == "fetch":
        return "fetched"
    return "cpu" if run.slots_per_layer is None and run.misses_per_token is None else "cached"


def machine_class(run: MeasuredRun) -> str:
    """The hardware of a run in a word: its GPU, how many, and the CPU where that runs experts."""
    several = f"{run.devices}x " if run.devices > 1 else ""
    host = f" + {run.cpu}" if run.elsewhere == "cpu" and run.cpu is not None else ""
    return f"{several}{run.gpu}{host}"


def engine_of(run: MeasuredRun) -> EngineSpec:
    """The profile of the run's engine, or the default one of its kind."""
    found = _device(profile_of(run))
    if not isinstance(found, EngineSpec):
        raise SpecError(f"run {run.id}: engine {run.engine!r} is no engine spec")
    return found


def model_of(run: MeasuredRun) -> MoEModel:
    """The run's model at its stored bits."""
    return _model(run.model, run.expert_bits, run.other_bits, run.head_bits, run.active_experts)


@functools.cache
def _model(name: str, expert: float, other: float, head: float | None, active: int | None) -> MoEModel:
    stored = {part: Storage.uniform(bits).expert for part, bits in (("expert", expert), ("head", head or other))}
    model = replace(MoEModel.from_config(name), storage=replace(Storage.uniform(other), **stored))
    if active is None:
        return model
    kinds = tuple(
        kind if kind.experts is None else replace(kind, experts=replace(kind.experts, top_k=active))
        for kind in model.feed_forward
    )
    return replace(model, feed_forward=kinds)


def system_of(run: MeasuredRun) -> System:
    """The run's machine under its engine."""
    engine = engine_of(run)
    system = _machine(run.gpu, run.devices, run.split, run.link, run.cpu, run.sockets, run.numa, run.dram_gb_per_s)
    if run.expert_read_gb_per_s is not None and system.cpu is not None:
        share = run.expert_read_gb_per_s / system.cpu.dram_bandwidth_gb_per_s
        measured = Source(
            source="measured", citation="what the CPU of this machine reads experts at, as the run states"
        )
        engine = engine.with_values({"cpu_efficiency": share}, {"cpu_efficiency": measured})
    if run.copies is not None and run.copies != engine.copies:
        values = {"copies": run.copies, "pageable_gb_per_s": engine.pageable_gb_per_s or PAGEABLE_GB_PER_S}
        stated = Source(source="measured", citation="copies as the run states them, at a rate seen on other machines")
        engine = engine.with_values(values, dict.fromkeys(values, stated))
    return system.with_engine(engine)


@functools.cache
def _machine(
    gpu: str, devices: int, split: str | None, link: str | None, cpu: str | None, sockets: int | None, numa: str | None,
    dram_gb_per_s: float | None,
) -> System:  # fmt: skip
    parts = {"gpu": _device(gpu), "link": _device(link or "pcie-4.0-x16"), "cpu": None if cpu is None else _device(cpu)}
    card, wire, host = parts["gpu"], parts["link"], parts["cpu"]
    assert isinstance(card, GpuSpec) and isinstance(wire, LinkSpec) and (host is None or isinstance(host, CpuSpec))
    name = "-".join(spec.name for spec in (card, host) if spec is not None)[:80]
    system = System(name=name, description="machine of a measured run", gpu=card, link=wire, cpu=host)
    stated: dict[str, float | str] = {}
    if devices > 1:
        stated |= {"gpu.devices": devices, "gpu.split": split or "tensor"}
    if host is not None:
        share = 1.0
        if sockets is not None and sockets != host.sockets:
            share = sockets / host.sockets
            stated["cpu.sockets"] = sockets
        peak = host.dram_bandwidth_gb_per_s * share if dram_gb_per_s is None else dram_gb_per_s
        stated["cpu.dram_bandwidth_gb_per_s"] = peak
        if share != 1.0:
            stated |= {f"cpu.peak_tflop_per_s.{key}": peak * share for key, peak in host.peak_tflop_per_s.items()}
        if numa == "one-socket":
            # How several sockets scale was read off some of these very runs; the engine's share stands for it here.
            stated["cpu.numa"] = numa
    return system.with_values(stated, source="measured", citation="as the run states it") if stated else system


def _decode_layers(run: MeasuredRun, model: MoEModel, engine: EngineSpec) -> tuple[Layers, ...]:
    """The layers of a decode step by state."""
    tokens, layers, bits = run.batch, float(model.num_moe_layers), model.expert_bits
    distinct = run.distinct_experts or distinct_experts(model, tokens, run.batch_of == "text")
    each = mean_tokens(tokens, model.top_k, distinct)

    def on(executor: Executor, number: float, when: When = When.NOW) -> Experts:
        return Experts(executor, number, each, bits, when)

    if run.gpu_experts == 1.0 or run.gpu_experts is None:
        return (Layers(layers, (on(Executor.GPU, distinct),)),)
    if run.loads_per_step is not None:
        return _fetched_layers(run, layers, distinct, on)
    if run.misses_per_token is not None or run.slots_per_layer is not None:
        return _cached_layers(run, model, engine, layers, distinct, on)
    away = layers * (1.0 - run.gpu_experts)
    here = Layers(layers - away, (on(Executor.GPU, distinct),))
    if run.elsewhere == "cpu":
        return (here, Layers(away, (on(Executor.CPU, distinct),), round_trips=1.0, crossing=tokens))
    return (here, Layers(away, (on(Executor.FETCH, distinct),)))


def _fetched_layers(run: MeasuredRun, layers: float, distinct: float, on: "_On") -> tuple[Layers, ...]:
    """Layers of an engine that copies what it misses, by how many copies a layer needs.

    What is copied ahead is as much in every layer that misses so many, which is what a prefetcher with a window does.
    """
    assert run.loads_per_step is not None
    whole = max(1.0, float(round(distinct)))
    mean = run.loads_per_step / layers
    share = min(1.0, mean / whole)
    # Means of whole numbers of experts stand for a number that is not whole.
    rows = [(number, copies * (mean / (share * whole) if share else 0.0)) for number, copies in
            binomial_layers(layers, whole, share)]  # fmt: skip
    window = _ahead_of_each(rows, run.prefetches_per_step or 0.0)
    found = []
    for number, copies in rows:
        # A window that is no whole number is the next lower one in some layers and the next higher one in the others.
        for early, part in ((math.floor(window), 1.0 - window % 1.0), (math.ceil(window), window % 1.0)):
            ahead = min(copies, early)
            experts = (
                on(Executor.GPU, max(0.0, distinct - copies)),
                on(Executor.FETCH, copies - ahead),
                on(Executor.FETCH, ahead, When.AHEAD),
            )
            found.append(Layers(number * part, experts))
    return tuple(found)


def _ahead_of_each(rows: Sequence[tuple[float, float]], ahead: float) -> float:
    """Most copies of a layer that come ahead, in the mean, so that all layers together have ``ahead`` of them [1]."""
    window = 0.0
    for _ in range(math.ceil(max((copies for _, copies in rows), default=0.0))):
        more = sum(number * (min(copies, window + 1.0) - min(copies, window)) for number, copies in rows)
        if more <= 0.0 or ahead <= more:
            return window + (ahead / more if more > 0.0 else 0.0)
        ahead, window = ahead - more, window + 1.0
    return window


def _cached_layers(
    run: MeasuredRun, model: MoEModel, engine: EngineSpec, layers: float, distinct: float, on: "_On"
) -> tuple[Layers, ...]:
    """Layers of a cache on the GPU whose misses the CPU runs, by how many miss.

    Copies into the cache go on behind, but what the host does for each of them is done in turn with the rest.
    """
    missed = missed_per_token(run, model) * run.batch / layers
    uploads = uploads_per_token(run, model) * run.batch / layers
    per_copy = (engine.copy_overhead_us or 0.0) / engine.round_trip_us if engine.round_trip_us else 0.0
    found = []
    for number, misses in binomial_layers(layers, distinct, min(1.0, missed / distinct)):
        experts = (
            on(Executor.GPU, distinct - misses),
            on(Executor.CPU, misses),
            on(Executor.COPY, uploads, When.BEHIND),
        )
        found.append(Layers(number, experts, round_trips=1.0 + uploads * per_copy, crossing=run.batch))
    return tuple(found)


#: Hit rates of LRU slots in every layer over real prompts of Qwen3-30B-A3B (everett6/moe-prefetch
#: artifacts/p7_slot_allocation.json, 512 tokens): replayed there without an engine, so no speed is in them.
LRU_HITS = {16: 0.581, 24: 0.7009, 32: 0.7811, 40: 0.838, 48: 0.8785, 56: 0.9074, 64: 0.929, 72: 0.944, 80: 0.9556, 88: 0.965}  # fmt: skip


def missed_per_token(run: MeasuredRun, model: MoEModel) -> float:
    """Experts that a token finds missing, over all layers [1]: counted by the run, or from the slots of its cache."""
    if run.misses_per_token is not None:
        return run.misses_per_token
    assert run.slots_per_layer is not None
    share = np.interp(run.slots_per_layer * 128.0 / model.num_experts, list(LRU_HITS), list(LRU_HITS.values()))
    return float((1.0 - share) * model.top_k * model.num_moe_layers)


#: Copies into a cache for each miss, where every first miss is admitted and nothing else is said (25.0 of 38.2 counted
#: by the engine of everett6/moe-prefetch, artifacts/r3_real_throughput_stack.json).
UPLOADS_PER_MISS = 0.654


def uploads_per_token(run: MeasuredRun, model: MoEModel) -> float:
    """Experts copied into the cache behind a token, over all layers [1]: counted by the run, or from its misses."""
    if run.uploads_per_token is not None:
        return run.uploads_per_token
    return UPLOADS_PER_MISS * missed_per_token(run, model)


def decode_step(run: MeasuredRun, model: MoEModel, engine: EngineSpec) -> Step:
    """The run's decode step."""
    sequences = run.batch if run.batch_of == "sequences" else 1.0
    assert run.context_tokens is not None
    fetch = "pipelined" if run.prefetch not in (None, "none") else "before"
    layers = _decode_layers(run, model, engine)
    return Step(run.batch, sequences, run.context_tokens, layers, engine.overlap, fetch)  # type: ignore[arg-type]


def prefill(run: MeasuredRun, model: MoEModel, engine: EngineSpec) -> Prefill:
    """The run's prompt, in the passes that it or its engine states."""
    assert run.prompt_tokens is not None
    tokens = run.prompt_tokens
    longest = run.prefill_micro_batch or engine.micro_batch_tokens or tokens
    passes = math.ceil(tokens / longest)
    each = tokens / passes
    distinct = distinct_experts(model, each, run.batch_of == "text")
    experts = (passes * distinct, mean_tokens(each, model.top_k, distinct), model.expert_bits)
    layers = float(model.num_moe_layers)
    share = 1.0 if run.gpu_experts is None else run.gpu_experts
    # An expert that is somewhere in a layer's cache is one that the prompt need not wait for.
    here = Layers(layers * share, (Experts(Executor.GPU, *experts),))
    away = layers * (1.0 - share)
    switch = engine.prefill_cpu_below_tokens
    on_cpu = run.elsewhere == "cpu" and (engine.prefill_experts == "cpu" or (switch is not None and each < switch))
    if on_cpu:
        there = Layers(away, (Experts(Executor.CPU, *experts),), round_trips=passes, crossing=tokens)
    else:
        there = Layers(away, (Experts(Executor.FETCH, *experts),))
    after = float(run.prefill_after_tokens or 0)
    return Prefill(tokens, passes, (here, there) if away else (here,), after, engine.overlap, "pipelined")


def _copied_in_runs(system: System, prompt: Prefill, model: MoEModel) -> System:
    """The system with its overhead of a copy shared by neighbouring experts, which a prefill copies in one call.

    Of E experts of which D are copied in no particular order, ``D (1 - D / E) + 1`` begin a run of neighbours.
    """
    fetched = [part.number for one in prompt.layers for part in one.experts if part.executor == Executor.FETCH]
    overhead = None if system.engine is None else system.engine.copy_overhead_us
    if not fetched or not overhead:
        return system
    distinct = fetched[0] / prompt.passes
    runs = distinct * (1.0 - distinct / model.num_experts) + 1.0
    share = min(1.0, runs / distinct)
    cite = "neighbouring experts are copied in one call"
    return system.with_values({"engine.copy_overhead_us": overhead * share}, source="derived", citation=cite)


class _On:
    """Type of the helper that makes `Experts` of one token count."""

    def __call__(self, executor: Executor, number: float, when: When = When.NOW) -> Experts:
        raise AssertionError


def predicted(runs: Sequence[MeasuredRun], quantity: str) -> tuple[Predicted, ...]:
    """Runs that count, ready to be priced; ``quantity`` is ``decode`` or ``prefill``."""
    found = []
    for run in runs:
        model, system, engine = model_of(run), system_of(run), engine_of(run)
        if quantity == "decode":
            measured = run.decode_tok_per_s
            if measured is None:
                assert run.step_ms is not None
                measured = 1e3 * run.batch / run.step_ms
            step = PricedStep(model, decode_step(run, model, engine))
            found.append(Predicted(run, quantity, system, step, run.batch, measured))
        else:
            assert run.prefill_tok_per_s is not None and run.prompt_tokens is not None
            prompt = prefill(run, model, engine)
            system = _copied_in_runs(system, prompt, model)
            one = PricedPrefill(model, prompt)
            # GPUs that split the layers work on several passes at once, like a pipeline that fills and drains.
            stages = run.devices if run.split == "layer" and residency(run) == "resident" else 1
            at_once = prompt.passes * stages / (prompt.passes + stages - 1)
            found.append(Predicted(run, quantity, system, one, run.prompt_tokens * at_once, run.prefill_tok_per_s))
    return tuple(found)
