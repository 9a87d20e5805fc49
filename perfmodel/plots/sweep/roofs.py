"""Where the operators of a model lie on the rooflines of a system, by the formulas that price them."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.kernels import front, link, roofline, systolic
from perfmodel.kernels import point as place
from perfmodel.kernels.cpu import ACTIVATION_BYTES
from perfmodel.operators import attention_rows, operators
from perfmodel.plots.words import number
from perfmodel.point import hardware_point, ndp_bytes_per_s
from perfmodel.policies import Executor
from perfmodel.run import Run

Phase = Literal["decode", "prefill"]
_NAMES = {"router": "router", "dense": "dense layer", "head": "LM head", "experts_gpu": "shared expert"}


class Roof(NamedTuple):
    """What a unit can reach: ``min(flops_per_s, intensity * bytes_per_s)`` [FLOP/s].

    name : what it belongs to, with both of its rates.
    """

    unit: Literal["gpu", "link", "ndp"]
    flops_per_s: float
    bytes_per_s: float
    name: str

    def at(self, intensity: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rate at an arithmetic intensity [FLOP/byte] [FLOP/s]."""
        return np.minimum(self.flops_per_s, np.asarray(intensity) * self.bytes_per_s)


class Mark(NamedTuple):
    """One operator: arithmetic per byte that its unit moves [FLOP/byte], and what it reaches [FLOP/s].

    copied : whether its weights come over the link first, whose bytes then count.
    """

    name: str
    phase: Phase
    intensity: float
    rate: float
    copied: bool = False


class Panel(NamedTuple):
    """One figure: its roofs and the operators below them."""

    title: str
    roofs: tuple[Roof, ...]
    marks: tuple[Mark, ...]


def _tokens(run: Run) -> tuple[float, float, float]:
    """Mean context of a decode step, mean prompt, and prompt tokens of one expert when they spread evenly [1]."""
    prompt = float(run.plan.prompt_tokens.mean()) if run.prefill is not None else 0.0
    spread = max(1.0, float(round(prompt * run.model.top_k / run.model.num_experts))) if prompt else 0.0
    return float(run.contexts.mean()), prompt, spread


def _widths(runs: Sequence[Run], *executors: Executor) -> list[float]:
    """Bits of the experts that these executors run under any of the plans."""
    return sorted({float(work.bits) for run in runs for work in run.plan.classes if work.executor in executors})


def gpu_panel(runs: Sequence[Run]) -> Panel:
    """The GPU and the link that feeds it, with everything that a layer runs there."""
    run = runs[0]
    model, point = run.model, hardware_point(run.system)
    flops_per_s, bytes_per_s = float(point[place.GPU_FLOPS]), float(point[place.GPU_BANDWIDTH])
    link_bytes_per_s = float(point[place.LINK_BANDWIDTH])
    roofs = (
        Roof(
            "gpu", flops_per_s, bytes_per_s,
            f"GPU: {number(bytes_per_s / 1e9)} GB/s, {number(flops_per_s / 1e12)} TFLOP/s",
        ),
        Roof("link", np.inf, link_bytes_per_s, f"link: {number(link_bytes_per_s / 1e9)} GB/s"),
    )  # fmt: skip
    context, prompt, spread = _tokens(run)
    marks = _attention_marks(run, point, context, prompt)
    for tokens, phase in _phases(1.0, prompt):
        for op in operators(model):
            if op.params and not (phase == "prefill" and op.part == "head"):  # one token of a prompt passes the head
                row = op.row(model, tokens)
                flops, moved = row[front.FLOPS], row[front.BYTES]
                time = _gpu_time(point, flops, moved, 1.0, row[front.LAUNCHES])
                marks.append(_mark(_NAMES[op.part], phase, flops, moved, time))
    for bits in _widths(runs, Executor.GPU):
        for tokens, phase in _phases(1.0, spread):
            flops, moved, time = _gpu_expert(run, point, bits, tokens)
            marks.append(_mark(f"expert {bits:g}-bit", phase, flops, moved, time))
    for bits in _widths(runs, Executor.FETCH):
        flops, _, time = _gpu_expert(run, point, bits, 1.0)
        weights = model.expert_params * bits / 8
        copy = link.transfer_time(
            weights, link_bytes_per_s, float(point[place.LINK_LATENCY]), float(point[place.LINK_N_HALF])
        )
        mark = _mark(f"copied expert {bits:g}-bit", "decode", flops, weights, time + float(copy))
        marks.append(mark._replace(copied=True))
    return Panel(f"GPU: {run.system.gpu.name}", roofs, tuple(marks))


def ndp_panel(runs: Sequence[Run]) -> Panel | None:
    """The near-data device with experts at every width in use; None on a system without one."""
    run = runs[0]
    ndp, point = run.system.ndp, hardware_point(run.system)
    widths = _widths(runs, Executor.NDP)
    if ndp is None or not widths:
        return None
    bytes_per_s = ndp_bytes_per_s(run.system)
    roofs, marks = [], []
    quantised = {
        float(work.bits): work.quantised for one in runs for work in one.plan.classes if work.executor == Executor.NDP
    }
    _, _, spread = _tokens(run)
    for bits in widths:
        rate = ndp.array_rate(min(bits, place.MAX_RATE_BITS))
        peak = ndp.peak_flops_per_s * rate
        rates = f"{number(bytes_per_s / 1e9)} GB/s, {number(peak / 1e12)} TFLOP/s"
        roofs.append(Roof("ndp", peak, bytes_per_s, f"near data, {bits:g}-bit: {rates}"))
        stored = bits + (ndp.scale_bits_per_weight if quantised[bits] else 0.0)
        for tokens, phase in _phases(1.0, spread):
            flops = sum(2.0 * tokens * rows * cols for rows, cols in run.model.expert_matrices)
            moved = sum(rows * cols for rows, cols in run.model.expert_matrices) * stored / 8
            time = sum(
                float(
                    systolic.gemm_time(
                        tokens, rows, cols, stored, ndp.rows, ndp.cols, ndp.arrays, ndp.clock_hz,
                        point[place.NDP_DATAFLOW], rate, bytes_per_s,
                    )
                )
                for rows, cols in run.model.expert_matrices
            )  # fmt: skip
            marks.append(_mark(f"expert {bits:g}-bit", phase, flops, moved, time))
    return Panel(f"Near-data device: {ndp.name}", tuple(roofs), tuple(marks))


def _phases(decode: float, prefill: float) -> list[tuple[float, Phase]]:
    """Tokens of both phases; without a prefill only decode."""
    return [(decode, "decode"), (prefill, "prefill")] if prefill else [(decode, "decode")]


def _mark(name: str, phase: Phase, flops: float, moved: float, time: float) -> Mark:
    return Mark(name, phase, float(flops / moved), float(flops / time))


def _gpu_expert(run: Run, point: NDArray[np.float64], bits: float, tokens: float) -> tuple[float, float, float]:
    """Arithmetic [FLOP], traffic [byte] and time [s] of one expert on the GPU."""
    model = run.model
    flops = 2.0 * tokens * model.expert_params
    moved = model.expert_params * bits / 8 + 2 * tokens * model.hidden_size * ACTIVATION_BYTES
    count = len(model.expert_matrices)
    return flops, moved, _gpu_time(point, flops, moved, count, count)


def _gpu_time(point: NDArray[np.float64], flops: float, moved: float, kernels: float, launches: float) -> float:
    """Time of one operator of several kernels [s]."""
    return float(
        roofline.roofline_time(
            flops, moved, point[place.GPU_FLOPS], point[place.GPU_BANDWIDTH], kernels * point[place.GPU_N_HALF],
            launches * point[place.LAUNCH_OVERHEAD],
        )
    )  # fmt: skip


def _attention_marks(run: Run, point: NDArray[np.float64], context: float, prompt: float) -> list[Mark]:
    """Attention of one layer, every kind of it, over the mean context and over the mean prompt."""
    marks = []
    rows = attention_rows(run.model)
    for row in rows:
        name = "attention" if len(rows) == 1 else f"{'full' if np.isinf(row[front.WINDOW]) else 'window'} attention"
        seen = min(context, row[front.WINDOW])
        flops = row[front.WEIGHT_FLOPS] + row[front.CONTEXT_FLOPS] * seen
        moved = row[front.WEIGHT_BYTES] + row[front.CONTEXT_BYTES] * seen
        time = _gpu_time(point, flops, moved, 1.0, row[front.ATTENTION_LAUNCHES])
        marks.append(_mark(name, "decode", flops, moved, time))
        if prompt:
            pairs = float(roofline.causal_pairs(prompt, row[front.WINDOW]))
            flops = row[front.WEIGHT_FLOPS] * prompt + row[front.CONTEXT_FLOPS] * pairs
            moved = row[front.WEIGHT_BYTES] + row[front.CONTEXT_BYTES] * prompt
            time = _gpu_time(point, flops, moved, 1.0, row[front.ATTENTION_LAUNCHES])
            marks.append(_mark(name, "prefill", flops, moved, time))
    return marks
