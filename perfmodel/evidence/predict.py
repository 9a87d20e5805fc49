"""What the model says of a measured run: its step or its prompt told by counts, on its machine under its engine.

A run names a model, a machine, an engine and where the experts were; nothing of it enters the prediction but these and
its counters (misses, copies, different experts), never its speed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.evidence.described import engine_of, model_of, needed, residency, system_of
from perfmodel.evidence.measured import MeasuredRun
from perfmodel.evidence.occupancy import distinct_experts, missed_per_token, uploads_per_token
from perfmodel.hardware import EngineSpec, System
from perfmodel.hardware.base import shown
from perfmodel.model import MoEModel
from perfmodel.point import Points, hardware_point
from perfmodel.policies import Executor, When
from perfmodel.steps import Experts, Layers, Prefill, PricedPrefill, PricedStep, Step, binomial_layers, mean_tokens


class Predicted(NamedTuple):
    """A run that counts, ready to be priced.

    quantity : ``decode`` or ``prefill``. tokens : that one priced time yields, over all sequences [1]. measured :
    tokens per second [token/s].
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


#: Mean context of a decode step where a run says nothing of it (assumed: short chats) [token].
USUAL_CONTEXT = 500.0


def context_of(run: MeasuredRun) -> float:
    """Mean context of a decode step [token]: as stated, else the prompt and half the output, else `USUAL_CONTEXT`."""
    if run.context_tokens is not None:
        return run.context_tokens
    if run.prompt_tokens is None:
        return USUAL_CONTEXT
    return run.prompt_tokens + (run.output_tokens or 0) / 2.0


def _check_counters(run: MeasuredRun, model: MoEModel, tokens: float, distinct: float) -> None:
    """Refuse counts that no step of the model can have; SpecError."""
    layers, per_token = model.num_moe_layers, model.top_k * model.num_moe_layers
    for key, most in (
        ("distinct_experts", min(model.num_experts, model.top_k * tokens)),
        ("slots_per_layer", model.num_experts),
        ("misses_per_token", per_token),
        ("uploads_per_token", per_token),
        ("loads_per_step", distinct * layers),
        ("prefetches_per_step", run.loads_per_step or 0.0),
    ):
        found = getattr(run, key)
        if found is not None and found > most * (1.0 + 1e-3):
            raise SpecError(f"run {run.id}: key '{key}' is {shown(found)}; allowed: at most {most:g} with this model")


class _Visited(NamedTuple):
    """The experts that a step visits in each of its layers: how many, tokens of each, and their stored bits."""

    number: float
    tokens: float
    bits: float

    def on(self, executor: Executor, number: float, when: When = When.NOW) -> Experts:
        """So many of them on one executor."""
        return Experts(executor, number, self.tokens, self.bits, when)


def _decode_layers(run: MeasuredRun, model: MoEModel, engine: EngineSpec) -> tuple[Layers, ...]:
    """The layers of a decode step by state."""
    tokens, layers = needed(run, "batch", run.batch), float(model.num_moe_layers)
    distinct = run.distinct_experts or distinct_experts(model, tokens, run.batch_of == "text")
    _check_counters(run, model, tokens, distinct)
    visited = _Visited(distinct, mean_tokens(tokens, model.top_k, distinct), model.expert_bits)
    if run.gpu_experts == 1.0 or run.gpu_experts is None:
        return (Layers(layers, (visited.on(Executor.GPU, distinct),)),)
    if run.loads_per_step is not None:
        return _fetched_layers(run.loads_per_step, run.prefetches_per_step or 0.0, layers, visited)
    if run.misses_per_token is not None or run.slots_per_layer is not None:
        missed, uploads = missed_per_token(run, model), uploads_per_token(run, model)
        return _cached_layers(missed, uploads, tokens, engine, layers, visited)
    away = layers * (1.0 - run.gpu_experts)
    here = Layers(layers - away, (visited.on(Executor.GPU, distinct),))
    if run.elsewhere == "cpu":
        return (here, Layers(away, (visited.on(Executor.CPU, distinct),), round_trips=1.0, crossing=tokens))
    return (here, Layers(away, (visited.on(Executor.FETCH, distinct),)))


def _fetched_layers(loads: float, prefetches: float, layers: float, visited: _Visited) -> tuple[Layers, ...]:
    """Layers of an engine that copies what it misses, by how many copies a layer needs.

    What is copied ahead is as much in every layer that misses so many, which is what a prefetcher with a window does.

    loads : copies of a step over all layers [1]; prefetches : those of them that come ahead [1].
    """
    distinct = visited.number
    whole = max(1.0, float(round(distinct)))
    mean = loads / layers
    share = min(1.0, mean / whole)
    # Means of whole numbers of experts stand for a number that is not whole.
    scale = mean / (share * whole) if share else 0.0
    rows = [(number, copies * scale) for number, copies in binomial_layers(layers, whole, share)]
    window = _ahead_of_each(rows, prefetches)
    found = []
    for number, copies in rows:
        # A window that is no whole number is the next lower one in some layers and the next higher one in the others.
        for early, part in ((math.floor(window), 1.0 - window % 1.0), (math.ceil(window), window % 1.0)):
            ahead = min(copies, early)
            experts = (
                visited.on(Executor.GPU, max(0.0, distinct - copies)),
                visited.on(Executor.FETCH, copies - ahead),
                visited.on(Executor.FETCH, ahead, When.AHEAD),
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
    missed: float, uploads: float, tokens: float, engine: EngineSpec, layers: float, visited: _Visited
) -> tuple[Layers, ...]:
    """Layers of a cache on the GPU whose misses the CPU runs, by how many miss.

    Copies into the cache go on behind, but what the host does for each of them is done in turn with the rest.

    missed, uploads : experts of a token over all layers [1].
    """
    distinct = visited.number
    missed, uploads = missed * tokens / layers, uploads * tokens / layers
    per_copy = (engine.copy_overhead_us or 0.0) / engine.round_trip_us if engine.round_trip_us else 0.0
    found = []
    for number, misses in binomial_layers(layers, distinct, min(1.0, missed / distinct)):
        experts = (
            visited.on(Executor.GPU, distinct - misses),
            visited.on(Executor.CPU, misses),
            visited.on(Executor.COPY, uploads, When.BEHIND),
        )
        found.append(Layers(number, experts, round_trips=1.0 + uploads * per_copy, crossing=tokens))
    return tuple(found)


def decode_step(run: MeasuredRun, model: MoEModel, engine: EngineSpec) -> Step:
    """The run's decode step; SpecError where the run lacks its batch."""
    batch, context = needed(run, "batch", run.batch), context_of(run)
    layers = _decode_layers(run, model, engine)
    return Step(
        tokens=batch,
        sequences=batch if run.batch_of == "sequences" else 1.0,
        context=context,
        layers=layers,
        overlap=engine.overlap,
        # Copies on demand hold up the layer; only an engine that foretells all of them runs experts as they come.
        fetch="pipelined" if run.prefetch == "oracle" else "before",
    )


def prefill(run: MeasuredRun, model: MoEModel, engine: EngineSpec) -> Prefill:
    """The run's prompt, in the passes that it or its engine states; SpecError where the run lacks its length."""
    tokens = needed(run, "prompt_tokens", run.prompt_tokens)
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


def predicted(runs: Sequence[MeasuredRun], quantity: str) -> tuple[Predicted, ...]:
    """Runs that count, ready to be priced.

    quantity : ``decode`` or ``prefill``.

    Raises
    ------
    SpecError : another quantity, or a run that does not count on this one; it says what is missing.
    """
    ready = {"decode": _decode, "prefill": _prefill}.get(quantity)
    if ready is None:
        raise SpecError(f"quantity is {shown(quantity)}; allowed: decode, prefill")
    return tuple(ready(run) for run in runs)


def _decode(run: MeasuredRun) -> Predicted:
    model, engine = model_of(run), engine_of(run)
    batch, measured = needed(run, "batch", run.batch), run.decode_tok_per_s
    if measured is None:
        measured = 1e3 * batch / needed(run, "step_ms", run.step_ms)
    step = PricedStep(model, decode_step(run, model, engine))
    return Predicted(run, "decode", system_of(run), step, batch, measured)


def _prefill(run: MeasuredRun) -> Predicted:
    model, engine = model_of(run), engine_of(run)
    prompt = prefill(run, model, engine)
    system = _copied_in_runs(system_of(run), prompt, model)
    # GPUs that split the layers work on several passes at once, like a pipeline that fills and drains.
    stages = run.devices if run.split == "layer" and residency(run) == "resident" else 1
    at_once = prompt.passes * stages / (prompt.passes + stages - 1)
    measured = needed(run, "prefill_tok_per_s", run.prefill_tok_per_s)
    return Predicted(run, "prefill", system, PricedPrefill(model, prompt), prompt.tokens * at_once, measured)
