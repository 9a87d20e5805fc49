"""Decode steps and prefills told by counts, instead of by a recorded trace.

A measurement comes without its routing: what is known is the model, the batch, how many experts a layer visits, and
how many of them were resident, fetched or run by the CPU. That is enough to build the states that a trace would give,
and to price them by the same kernels as any `Run`.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.hardware.base import shown
from perfmodel.kernels import front, layer
from perfmodel.kernels import point as place
from perfmodel.kernels import price as kernel
from perfmodel.kernels import work as kinds
from perfmodel.model import MoEModel
from perfmodel.operators import attention_rows, fixed_counts, operator_rows
from perfmodel.point import Points
from perfmodel.policies import Executor, When
from perfmodel.policies.costs import expert_matrices

_ROUTER, _DENSE = 0, 1  # the first two operators


class Experts(NamedTuple):
    """Experts of one layer that are treated alike.

    number : how many, which may be a mean [1]. tokens : tokens that each of them gets [1]. bits : of a weight [bit].
    """

    executor: Executor
    number: float
    tokens: float
    bits: float
    when: When = When.NOW


class Layers(NamedTuple):
    """Layers with experts that are in the same state.

    number : how many of a step's layers, which may be a mean [1]. experts : what they run, copies in the order of the
        list. round_trips : the host takes part so often in each [1]. crossing : tokens whose activations go to the CPU
        and come back [1].
    """

    number: float
    experts: tuple[Experts, ...]
    round_trips: float = 0.0
    crossing: float = 0.0


class Step(NamedTuple):
    """One decode step.

    tokens : new tokens of the step, all its sequences together [1]. sequences : sequences with a context of their own,
        1 for consecutive tokens of one sequence [1]. context : mean tokens that a new token attends to [1]. layers :
        the layers with experts by state. overlap : GPU and CPU work on a layer at the same time, or in turn. fetch :
        copies come before the computing of a layer, or every expert computes when its copy is there.
    """

    tokens: float
    sequences: float
    context: float
    layers: tuple[Layers, ...]
    overlap: Literal["max", "sum"] = "max"
    fetch: Literal["before", "pipelined"] = "before"


class Prefill(NamedTuple):
    """One prompt, in passes of equal length.

    tokens : of the prompt [1]. passes : micro-batches [1]. layers : the layers with experts by state, over all passes:
    an expert that every pass visits has ``passes`` as its number and the tokens of one pass. after : tokens that are in
    the cache already and that every new one attends to [1].
    """

    tokens: float
    passes: float
    layers: tuple[Layers, ...]
    after: float = 0.0
    overlap: Literal["max", "sum"] = "max"
    fetch: Literal["before", "pipelined"] = "before"


class _States(NamedTuple):
    """States in the order in which the kernels want them, and how often each occurs."""

    inputs: tuple[Any, ...]
    weight: NDArray[np.float64]


def _around(model: MoEModel, tokens: float, passes: float, last: float) -> NDArray[np.float64]:
    """Rows of the operators over so many tokens in so many passes; the head runs for ``last`` tokens, once."""
    rows = operator_rows(model, tokens / passes, last)
    # The shared experts too, as they belong to the layers, which hold all passes.
    rows[[_ROUTER, _DENSE, kernel.SHARED], front.REPEATS] *= passes
    return rows


def _check_entries(name: str, given: object, kind: type[Layers] | type[Experts]) -> None:
    if not isinstance(given, tuple | list) or not all(isinstance(one, kind) for one in given):
        raise PerfModelError(f"step: {name}: found {shown(given)}, allowed: a tuple of {kind.__name__}")


def _check_kinds(step: Step | Prefill) -> None:
    """Words and entries are of the kinds they are declared as."""
    for name, word, words in (
        ("overlap", step.overlap, ("max", "sum")),
        ("fetch", step.fetch, ("before", "pipelined")),
    ):
        if word not in words:
            raise PerfModelError(f"step: {name}: found {shown(word)}, allowed: {' or '.join(words)}")
    _check_entries("layers", step.layers, Layers)
    for one in step.layers:
        _check_entries("experts", one.experts, Experts)
        for part in one.experts:
            if part.executor not in list(Executor) or part.when not in list(When):
                found = f"executor {shown(part.executor)}, when {shown(part.when)}"
                raise PerfModelError(f"step: experts: found {found}, allowed: an Executor and a When")


def _check_number(number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, Real):
        raise PerfModelError(f"step: found {shown(number)}, allowed: numbers from 0 up")


def _check_layers(model: MoEModel, step: Step | Prefill) -> None:
    """Every layer with experts is in one of the states, and nothing is negative, endless or more than there is."""
    _check_kinds(step)
    if isinstance(step, Step):
        positive, numbers = [step.tokens], [step.sequences, step.context]
    else:
        positive, numbers = [step.tokens, step.passes], [step.after]
    for one in step.layers:
        numbers += [one.number, one.round_trips, one.crossing]
        numbers += [number for part in one.experts for number in (part.number, part.tokens, part.bits)]
    for number in (*positive, *numbers):
        _check_number(number)
        if not (math.isfinite(number) and number >= 0.0):
            raise PerfModelError(f"step: found the count {number:g}, allowed: numbers from 0 up")
    if min(positive) == 0.0:
        raise PerfModelError("step: found no tokens or no pass, allowed: numbers above 0")
    passes = step.passes if isinstance(step, Prefill) else 1.0
    if isinstance(step, Step) and step.sequences > step.tokens * (1.0 + 1e-9):
        raise PerfModelError(
            f"step: found {step.sequences:.9g} sequences with {step.tokens:.9g} tokens, allowed: a token each or more"
        )
    found, whole = math.fsum(one.number for one in step.layers), model.num_moe_layers
    if not math.isclose(found, whole, rel_tol=1e-9, abs_tol=1e-9):
        raise PerfModelError(
            f"step: its layers with experts add up to {found:.9g}, allowed: {whole}, those of model {model.name}"
        )
    for one in step.layers:
        run = math.fsum(part.number for part in one.experts if part.executor not in (Executor.SKIP, Executor.COPY))
        most = passes * model.num_experts
        if run > most * (1.0 + 1e-9):
            raise PerfModelError(
                f"step: found {run:.9g} experts in a layer, allowed: {most:.9g} or fewer, those of model {model.name}"
            )


def _states(model: MoEModel, step: Step | Prefill) -> _States:
    """Distinct kinds of work, rows and states of the layers; a dense network has none of them."""
    _check_layers(model, step)
    work: dict[tuple[float, ...], int] = {}
    entries: list[tuple[int, float]] = []
    offsets, host = [0], []
    for one in step.layers:
        for part in one.experts:
            if part.number > 0.0 and part.tokens > 0.0:
                key = (float(part.executor), part.tokens, part.bits, 0.0, float(part.when))
                entries.append((work.setdefault(key, len(work)), part.number))
        offsets.append(len(entries))
        host.append((one.round_trips, one.crossing))
    table = np.array(list(work), dtype=np.float64).reshape(-1, kinds.WORK_SIZE)
    count = np.array([one.number for one in step.layers], dtype=np.float64)
    number = np.arange(len(count), dtype=np.int64)
    before = np.full(len(count), -1, dtype=np.int64)
    if np.any(table[:, kinds.WHEN] != When.NOW):
        # What the layer before holds is independent of this one: every pair occurs as often as chance has it.
        number, before = (one.ravel().astype(np.int64) for one in np.meshgrid(number, number, indexing="ij"))
        count = np.outer(count, count).ravel() / count.sum()
    how = np.zeros(layer.HOW_SIZE, np.int64)
    how[layer.OVERLAPPED] = step.overlap == "max"
    how[layer.PIPELINED] = step.fetch == "pipelined"
    inputs = (
        float(model.num_layers),
        table,
        float(model.expert_params) if model.num_moe_layers else 0.0,
        float(model.hidden_size),
        expert_matrices(model) if model.num_moe_layers else np.empty((0, 3)),
        np.array(offsets, dtype=np.int64),
        np.array([number for number, _ in entries], dtype=np.int64),
        np.array([count for _, count in entries], dtype=np.float64),
        np.array(host, dtype=np.float64).reshape(-1, 2),
        number,
        before,
        how,
    )
    return _States(inputs, count)


#: What a device needs to run experts at all, and what it is called.
_DEVICES = {
    Executor.NDP: (place.NDP_BANDWIDTH, "a near-data device"),
    Executor.CPU: (place.CPU_BANDWIDTH, "a CPU"),
}


def _devices_of(step: Step | Prefill) -> tuple[Executor, ...]:
    """Devices beside the GPU that experts of a step run on."""
    ran = {part.executor for one in step.layers for part in one.experts if part.number > 0.0 and part.tokens > 0.0}
    return tuple(one for one in _DEVICES if one in ran)


def _check_devices(needed: Sequence[Executor], points: Points) -> None:
    """Every point has the devices that experts run on."""
    for executor in needed:
        at, name = _DEVICES[executor]
        varied = points.values[points.places == at]
        least = varied.min(initial=math.inf) if len(varied) else points.base[at]
        if not least > 0.0:
            raise PerfModelError(
                f"step: found experts on {name}, which the system does not have; allowed: one that has"
            )


class PricedStep:
    """A decode step ready to be priced at many hardware points.

    A dense network is a step without layers, as its own networks are around the experts.

    Raises
    ------
    PerfModelError : a count is no number, negative, not finite or more than there is, or the layers are not those of
        the model; when it is priced, a point without a device that experts run on.
    """

    def __init__(self, model: MoEModel, step: Step) -> None:
        states = _states(model, step)
        self._devices = _devices_of(step)
        attention = attention_rows(model, step.tokens, step.sequences)
        counts = fixed_counts(model, step.tokens, sequences=step.sequences)
        around = _around(model, step.tokens, 1.0, step.tokens)
        one, whole = np.ones(1), np.array([0, len(states.weight)], dtype=np.int64)
        each = np.arange(len(states.weight), dtype=np.int32)
        self._inputs = (
            attention, around, counts, *states.inputs, states.weight, np.array([step.context], dtype=np.float64), one,
            1.0, whole, each, states.weight,
        )  # fmt: skip

    def times(self, points: Points) -> NDArray[np.float64]:
        """Time of the step at every point [N] [s]."""
        _check_devices(self._devices, points)
        return np.asarray(kernel.token_means(*points, *self._inputs, False)[kernel.TOTAL])

    def parts(self, points: Points) -> dict[str, NDArray[np.float64]]:
        """The same by what is on the critical path, each [N] [s]: ``total_s``, and the parts that add up to it."""
        _check_devices(self._devices, points)
        means = kernel.token_means(*points, *self._inputs, True)
        state = kernel.STATE
        return {
            "total_s": means[kernel.TOTAL],
            "attention_s": means[kernel.ATTENTION],
            "around_s": means[kernel.ROUTER] + means[kernel.DENSE] + means[kernel.HEAD],
            "experts_gpu_s": means[state + layer.PATH_GPU],
            "link_s": means[state + layer.PATH_LINK],
            "ndp_s": means[state + layer.PATH_NDP],
            "cpu_s": means[state + layer.PATH_CPU],
            "overhead_s": means[kernel.OVERHEAD] + means[state + layer.PATH_HOST],
        }


class PricedPrefill:
    """A prefill ready to be priced at many hardware points; errors as in `PricedStep`."""

    def __init__(self, model: MoEModel, prefill: Prefill) -> None:
        states = _states(model, prefill)
        self._devices = _devices_of(prefill)
        around = _around(model, prefill.tokens, prefill.passes, 1.0)
        counts = fixed_counts(model, prefill.tokens / prefill.passes, prefill.passes)
        self._count = states.weight
        rows = len(states.weight)
        # Every kind of layer as a prefill of its own, with nothing around it, and once what is around all of them.
        alone = np.zeros((rows + 1, *around.shape))
        alone[:, kernel.SHARED], alone[-1] = around[kernel.SHARED], around
        fixed = np.zeros((rows + 1, front.COUNTS))
        fixed[-1] = counts
        offsets = np.append(np.arange(rows + 1), rows).astype(np.int64)
        lengths, prompts = np.zeros(rows + 1), np.zeros(rows + 1)
        lengths[-1], prompts[-1] = prefill.tokens, 1.0
        passes = np.zeros(rows + 1)
        passes[-1] = prefill.passes
        attention = attention_rows(model)
        seen = np.minimum(prefill.after, attention[:, front.WINDOW])
        attention[:, front.WEIGHT_FLOPS] += attention[:, front.CONTEXT_FLOPS] * seen
        attention[:, front.WEIGHT_BYTES] += attention[:, front.CONTEXT_BYTES] * seen
        self._inputs = (attention, alone, fixed, *states.inputs, offsets, lengths, prompts, passes)

    def times(self, points: Points) -> NDArray[np.float64]:
        """Time of the prefill at every point [N] [s]."""
        _check_devices(self._devices, points)
        each = kernel.prefill_times(*points, *self._inputs)
        return np.asarray(each[-1] + self._count @ each[:-1])


def mean_tokens(tokens: float, top_k: float, distinct: float) -> float:
    """Tokens of each expert that a layer visits [1]: ``tokens * top_k / distinct``."""
    return tokens * top_k / distinct if distinct > 0.0 else 0.0


def binomial_layers(layers: float, experts: float, share: float) -> Sequence[tuple[float, float]]:
    """Layers of a step by how many of their experts miss, each with the chance ``share``: pairs (layers, misses).

    Equation: ``layers * C(experts, m) * share^m * (1 - share)^(experts - m)`` layers have m misses. Where ``experts``
    is no whole number, all layers have the mean, ``experts * share``.
    """
    whole = round(experts)
    if whole != experts or share in (0.0, 1.0):
        return [(layers, experts * share)]
    chance = 1.0
    found = []
    for misses in range(whole + 1):
        found.append((layers * chance * share**misses * (1.0 - share) ** (whole - misses), float(misses)))
        chance *= (whole - misses) / (misses + 1)
    return found
