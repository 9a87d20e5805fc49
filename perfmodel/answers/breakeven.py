"""From how many tokens on it is faster to copy experts to the GPU than to run them on the CPU.

Both sides of one MoE layer, all of whose experts are in host memory:

- CPU: a round trip of the host, activations there and back over the link, and every used expert on the CPU.
- GPU: a round trip as well, since what to copy is known only after the router, then the used experts one after another
  over the link, and every one on the GPU.

Attention, router and shared experts are the same on both sides and left out. The smallest batch of tokens at which the
GPU side takes no longer than the CPU side is the break-even. It is the first crossing and need not be the last: what a
crossing of activations takes at least is paid once a batch, and a copy for every expert, so that with a few more
tokens, which visit more experts, the CPU can be faster again. From which batch on the GPU stays ahead, as far as was
looked, is said beside it. Engines decide by a rule instead: they copy from 32 tokens an expert on, which with E experts
of which a token visits k is a batch of 32 E / k.

`perfmodel.break_even` is another question: where one policy overtakes another along an axis.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.answers.occupancy import Occupancy, Recorded, Shares, Uniform
from perfmodel.errors import ModelConfigError, PerfModelError, SpecError, TraceError
from perfmodel.hardware import LinkSpec, System, load_spec, load_system
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import a_spec
from perfmodel.kernels import point as place
from perfmodel.kernels.cpu import ACTIVATION_BYTES, cpu_expert_time
from perfmodel.kernels.link import transfer_time
from perfmodel.kernels.roofline import padded_tokens, roofline_time
from perfmodel.model import MoEModel
from perfmodel.model.numbers import bits_of
from perfmodel.point import hardware_point
from perfmodel.routing import RoutingTrace
from perfmodel.scenario.numbers import whole

if TYPE_CHECKING:
    Floats = NDArray[np.float64]

#: Tokens an expert gets on average from which on engines copy it.
RULE_TOKENS = 32
MOST_BATCH, LARGEST_BATCH = 8192, 65536


class Batch(NamedTuple):
    """Both sides of a layer at one batch.

    tokens : the batch. used : experts that it visits, on average [1]. copy_s, gpu_s : all copies and all computing of
    the GPU side [s]. gpu_side_s, cpu_side_s : each side, round trip included [s].
    """

    tokens: int
    used: float
    copy_s: float
    gpu_s: float
    gpu_side_s: float
    cpu_side_s: float


class Cell(NamedTuple):
    """The break-even with another link and another rate of the host memory [GB/s]; None for none."""

    link: str
    ram_gb_per_s: float
    batch: int | None


@dataclass(frozen=True)
class BreakEven:
    """From which batch on copying experts beats running them on the CPU, per MoE layer.

    model, system, trace : names; trace is None for uniform routing. bits : stored bits of an expert's weights [bit].
    pipelined : whether an expert computes as soon as its copy is there, or all copies come first.
    most_batch : the largest batch that was looked at.
    batch : the break-even, None where copying is slower at every batch. at : both sides there.
    ahead_from : the batch from which on copying takes no longer at every batch up to the largest; None where it is
        slower at the largest.
    rule_batch : where the rule of 32 tokens an expert starts to copy [token].
    rows : both sides at powers of two. cells : other links and memories, if asked for. notes : what it rests on.
    """

    model: str
    system: str
    trace: str | None
    num_experts: int
    top_k: int
    bits: float
    pipelined: bool
    most_batch: int
    batch: int | None
    at: Batch | None
    ahead_from: int | None
    rule_batch: float
    rows: tuple[Batch, ...]
    cells: tuple[Cell, ...]
    notes: tuple[str, ...]


def break_even(
    model: MoEModel | str | os.PathLike[str],
    system: System | str | os.PathLike[str],
    *,
    bits: float | None = None,
    trace: RoutingTrace | str | os.PathLike[str] | None = None,
    pipelined: bool = False,
    most_batch: int = MOST_BATCH,
    links: Sequence[LinkSpec | str | os.PathLike[str]] = (),
    ram_gb_per_s: Sequence[float] = (),
) -> BreakEven:
    r"""The smallest batch at which copying the experts of a layer and running them on the GPU beats the CPU.

    With :math:`n_m` experts that get m tokens, of which :math:`\sum_{m>0} n_m` are used, the sides are

    .. math:: T_\mathrm{CPU} = t_\mathrm{trip} + 2 t_\mathrm{link}(2 B d) + \sum_{m>0} n_m t_\mathrm{CPU}(m) \qquad
        T_\mathrm{GPU} = t_\mathrm{trip} + \sum_{m>0} n_m (t_\mathrm{copy} + t_\mathrm{GPU}(m)).

    Parameters
    ----------
    model, system : objects, names or paths; the system needs a CPU.
    bits : stored bits of an expert's weights, scales included [bit]; by default those of the model.
    trace : routing whose windows of consecutive tokens say how many experts get how many tokens; it must have the
        experts and picks of the model. Windows do not overlap: every sequence is cut from its start, and a rest that
        is too short is left out, so that each batch has windows of its own. By default routing is uniform.
    pipelined : copies and computing overlap. The later of all copies and the mean last expert, and of the first copy
        and all computing, then counts; exact where all used experts get the same number of tokens, else a lower bound.
    most_batch : the largest batch to look at [token], 1 to 65536; of a trace at most its longest sequence.
    links, ram_gb_per_s : a table of break-evens over links and peak rates of the host memory [GB/s], all sockets. Both
        or neither. A faster memory never lowers the break-even. A faster link does not raise it either
        as long as the activations of the batch, which cross it there and back on the CPU side, are fewer bytes than one
        expert; with tiny experts they are not.

    Raises
    ------
    SpecError : the system has no CPU; a link or a rate is not possible.
    ModelConfigError : the model cannot be read, is dense, or its layers differ in their experts; bad bits.
    TraceError : the trace cannot be read, or has other experts than the model.
    PerfModelError : another argument is not such a value.
    """
    network, machine = _inputs(model, system)
    width = network.expert_bits if bits is None else bits_of(bits, "breakeven: bits")
    most = whole(most_batch)
    if most is None or not 1 <= most <= LARGEST_BATCH:
        raise PerfModelError(
            f"breakeven: most_batch is {shown(most_batch)}; allowed: a whole number from 1 to {LARGEST_BATCH}"
        )
    if not isinstance(pipelined, bool):
        raise PerfModelError(f"breakeven: pipelined is {shown(pipelined)}; allowed: True or False")
    recorded = None if trace is None else _fitting(trace, network)
    occupancy: Occupancy = (
        Uniform(network.num_experts, network.top_k, most) if recorded is None else Recorded(recorded, most)
    )
    others = _others(machine, links, ram_gb_per_s)
    sides = _Sides(network, [machine, *(one for _, _, one in others)], width, pipelined, occupancy.most_tokens)
    first, *rest = _first_batches(sides, occupancy)
    own = _Sides(network, [machine], width, pipelined, occupancy.most_tokens)
    powers = [2**i for i in range(occupancy.most_tokens.bit_length()) if 2**i <= occupancy.most_tokens]
    return BreakEven(
        model=network.name,
        system=machine.name,
        trace=None if recorded is None else str(recorded.metadata["model"]),
        num_experts=network.num_experts,
        top_k=network.top_k,
        bits=width,
        pipelined=pipelined,
        most_batch=occupancy.most_tokens,
        batch=first,
        at=None if first is None else own.at(first, occupancy.shares(first)),
        ahead_from=None if first is None else _ahead_from(own, occupancy, first),
        rule_batch=RULE_TOKENS * network.num_experts / network.top_k,
        rows=tuple(own.at(tokens, occupancy.shares(tokens)) for tokens in powers),
        cells=tuple(Cell(link, rate, batch) for (link, rate, _), batch in zip(others, rest, strict=True)),
        notes=tuple(_notes(machine, recorded, occupancy, most)),
    )


class _Sides:
    """Both sides of a layer on C systems, for experts that get 0 to ``most`` tokens."""

    def __init__(self, model: MoEModel, systems: Sequence[System], bits: float, pipelined: bool, most: int) -> None:
        points = np.array([hardware_point(system) for system in systems]).T[:, :, None]
        tokens, params = np.arange(most + 1.0), float(model.expert_params)
        weights = model.expert_bytes(bits)
        matrices = len(model.expert_matrices)
        moved = weights + 2.0 * tokens * model.hidden_size * ACTIVATION_BYTES
        self._pipelined, self._token_bytes = pipelined, model.hidden_size * ACTIVATION_BYTES
        self._link = points[[place.LINK_BANDWIDTH, place.LINK_LATENCY, place.LINK_N_HALF], :, 0]
        self._trip = points[place.ROUND_TRIP, :, 0]
        rate, latency, n_half = self._link
        self._copy = transfer_time(weights, rate, latency + points[place.COPY_OVERHEAD, :, 0], n_half)
        self._cpu = cpu_expert_time(
            tokens, params, weights, float(model.hidden_size), points[place.CPU_FLOPS],
            points[place.CPU_VECTOR_FLOPS], points[place.CPU_TILE], points[place.CPU_BANDWIDTH],
            points[place.CPU_OVERHEAD], points[place.CPU_PACK],
        )  # fmt: skip
        padded = padded_tokens(tokens, points[place.EXPERT_TILE])
        self._gpu = roofline_time(
            2.0 * padded * params, moved, points[place.GPU_FLOPS], points[place.EXPERT_BANDWIDTH],
            matrices * points[place.EXPERT_N_HALF], matrices * points[place.EXPERT_LAUNCH],
        )  # fmt: skip
        self._gpu[:, 0] = 0.0

    def parts(self, tokens: int, shares: Shares) -> tuple[Floats, Floats, Floats, Floats]:
        """Copies, computing on the GPU, and both sides, of every system [C]."""
        rate, latency, n_half = self._link
        crossing = 2.0 * transfer_time(tokens * self._token_bytes, rate, latency, n_half)
        cpu_side = self._trip + crossing + shares.sum(self._cpu)
        copies, gpu = shares.used * self._copy, shares.sum(self._gpu)
        if self._pipelined and shares.used > 0:
            work = np.maximum(copies + gpu / shares.used, self._copy + gpu)
        else:
            work = copies + gpu
        return copies, gpu, self._trip + work, cpu_side

    def at(self, tokens: int, shares: Shares) -> Batch:
        """Both sides on the first system."""
        return Batch(tokens, shares.used, *(float(one[0]) for one in self.parts(tokens, shares)))

    @property
    def count(self) -> int:
        """Number of systems, C."""
        return len(self._trip)


def _first_batches(sides: _Sides, occupancy: Occupancy) -> list[int | None]:
    """The smallest batch of every system at which its GPU side takes no longer; batches are tried one by one."""
    found: list[int | None] = [None] * sides.count
    for tokens in range(1, occupancy.most_tokens + 1):
        _, _, gpu_side, cpu_side = sides.parts(tokens, occupancy.shares(tokens))
        for i in np.flatnonzero(gpu_side <= cpu_side).tolist():
            found[i] = tokens if found[i] is None else found[i]
        if None not in found:
            break
    return found


def _ahead_from(sides: _Sides, occupancy: Occupancy, first: int) -> int | None:
    """The batch, at least the break-even, from which on the GPU side of the first system never takes longer."""
    for tokens in range(occupancy.most_tokens, first, -1):
        at = sides.at(tokens, occupancy.shares(tokens))
        if at.gpu_side_s > at.cpu_side_s:
            return tokens + 1 if tokens < occupancy.most_tokens else None
    return first


# ---- inputs ----


def _inputs(model: object, system: object) -> tuple[MoEModel, System]:
    network = model if isinstance(model, MoEModel) else MoEModel.from_config(model)  # type: ignore[arg-type]
    machine = system if isinstance(system, System) else load_system(system)  # type: ignore[arg-type]
    try:
        network.with_experts()
    except ModelConfigError as error:
        raise ModelConfigError(f"breakeven: {error}") from None
    if machine.cpu is None:
        raise SpecError(
            f"breakeven: system {machine.name} has no cpu, so experts cannot run there;"
            " allowed: a system with a cpu, such as rtx4090-pcie4-cpu"
        )
    return network, machine


def _fitting(trace: object, model: MoEModel) -> RoutingTrace:
    found = trace if isinstance(trace, RoutingTrace) else RoutingTrace.load(trace)  # type: ignore[arg-type]
    has, needs = (found.top_k, found.num_experts), (model.top_k, model.num_experts)
    if has != needs:
        raise TraceError(
            f"breakeven: the trace of {found.metadata['model']} picks {has[0]} of {has[1]} experts;"
            f" allowed: {needs[0]} of {needs[1]}, as in model {model.name}"
        )
    return found


def _others(system: System, links: object, rates: object) -> list[tuple[str, float, System]]:
    """Name of the link, rate of the memory, and the system with both, for every cell of the table."""
    given = []
    for name, values in (("links", links), ("ram_gb_per_s", rates)):
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise PerfModelError(f"breakeven: {name} is {shown(values)}; allowed: a list")
        given.append(list(values))
    if bool(given[0]) != bool(given[1]):
        missing = "ram_gb_per_s" if given[0] else "links"
        raise PerfModelError(f"breakeven: {missing} is empty; allowed: both links and ram_gb_per_s, or neither")
    return [
        (link.name, float(rate), machine)
        for link in map(_link, given[0])
        for rate in given[1]
        for machine in (_with_link(system, link).with_values({"cpu.dram_bandwidth_gb_per_s": rate}),)
    ]


def _link(given: object) -> LinkSpec:
    found = given if isinstance(given, LinkSpec) else load_spec(given)  # type: ignore[arg-type]
    if not isinstance(found, LinkSpec):
        raise SpecError(f"breakeven: {found.name} is {a_spec(found.kind)}; allowed: a link")
    return found


def _with_link(system: System, link: LinkSpec) -> System:
    # What was said of the peaks of the old link does not hold for this one.
    stated = {key: peak for key, peak in system.stated_peaks.items() if not key.startswith("link.")}
    return system.model_copy(update={"link": link, "stated_peaks": stated})


def _notes(system: System, trace: RoutingTrace | None, occupancy: Occupancy, most: int) -> Iterator[str]:
    yield from system.flags
    if system.host is None:
        yield f"system {system.name} has no host spec: round trips and copies cost the host nothing"
    if trace is None:
        yield "every expert is as likely as any other; real tokens of one text visit fewer experts"
    elif occupancy.most_tokens < most:
        yield f"batches end at the longest sequence of the trace, {occupancy.most_tokens} tokens"
    if trace is not None and trace.metadata["source"] != "recorded":
        yield f"the routing is {trace.metadata['source']}, not a recording"
