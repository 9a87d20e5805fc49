"""Systems as the numbers that kernels read, in SI units and after derating."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import PerfModelError, SpecError
from perfmodel.hardware import CpuSpec, EngineSpec, GpuSpec, NdpSpec, System
from perfmodel.kernels import dram, systolic
from perfmodel.kernels import point as place

_MAPPINGS = {
    "bank-group-interleaved": dram.INTERLEAVED,
    "bank-group-limited": dram.BANK_GROUP_LIMITED,
    "row-by-row": dram.ROW_BY_ROW,
}
#: Accesses a memory controller looks ahead where a spec does not say (the default of Ramulator 2).
DEFAULT_READ_BUFFER = 32
_SCALINGS = {"none": place.SCALING_NONE, "linear": place.SCALING_LINEAR, "native": place.SCALING_NATIVE}
#: Numbers in the reason for a contradiction, which is one reason whatever they are.
_NUMBERS = re.compile(r"(?<= is )[0-9.e+-]*[0-9]|(?<= gives )[0-9.e+-]+|(?<=\()[0-9]+(?=\))")
#: Keys that set the DRAM efficiency of a near-data device by way of its timings.
TIMINGS = ("ndp.dram.", "ndp.read_buffer")
_CHANNELS = ("cpu.memory_channels", "cpu.populated_channels")


class Points(NamedTuple):
    """Hardware points that differ in a few places only.

    base : float64 [POINT_SIZE], what all points share; its values at ``places`` do not count.
    places : int64 [V], the places that vary.
    values : float64 [V, N], their values at every point.
    """

    base: NDArray[np.float64]
    places: NDArray[np.int64]
    values: NDArray[np.float64]

    @property
    def num_points(self) -> int:
        """Number of points."""
        return int(self.values.shape[1])

    def dense(self) -> NDArray[np.float64]:
        """Every place of every point [N, POINT_SIZE]."""
        points = np.tile(self.base, (self.num_points, 1))
        points[:, self.places] = self.values.T
        return points

    def by_words(self) -> Iterator[tuple["Points", NDArray[np.int64] | slice]]:
        """Parts that share what is a word in a spec (dataflow, precision scaling), and where their points stand.

        Kernels read words once for all points. Only points that were given whole can differ in one.
        """
        words = [i for i, at in enumerate(self.places.tolist()) if at in (place.NDP_DATAFLOW, place.NDP_SCALING)]
        if not words:
            yield self, slice(None)
            return
        others = [i for i in range(len(self.places)) if i not in words]
        for combination in np.unique(self.values[words], axis=1).T:
            columns = np.flatnonzero((self.values[words] == combination[:, None]).all(axis=0))
            base = self.base.copy()
            base[self.places[words]] = combination
            yield Points(base, self.places[others], np.ascontiguousarray(self.values[others][:, columns])), columns

    @classmethod
    def of(cls, points: ArrayLike) -> "Points":
        """From all places of many points [N, POINT_SIZE]."""
        try:
            rows = np.asarray(points, dtype=np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise PerfModelError(f"points: not an array of numbers ({error})") from None
        if rows.ndim != 2 or rows.shape[1] != place.POINT_SIZE:
            raise PerfModelError(f"points: found shape {list(rows.shape)}, allowed [N, {place.POINT_SIZE}]")
        base = rows[0].copy() if len(rows) else np.ones(place.POINT_SIZE)
        places = np.flatnonzero((rows != base).any(axis=0))
        return cls(base, places, np.ascontiguousarray(rows[:, places].T))

    @classmethod
    def one(cls, point: NDArray[np.float64]) -> "Points":
        """A single point [POINT_SIZE]."""
        return cls(point, np.arange(0), np.empty((0, 1)))


def link_bytes_per_s(system: System) -> float:
    """Effective one-way rate of the link [byte/s], which pageable copies of an engine do not exceed."""
    rate = system.link.effective_bandwidth_bytes_per_s
    pageable = None if system.engine is None else system.engine.pageable_bytes_per_s
    return rate if pageable is None else np.minimum(rate, pageable)


def cpu_bytes_per_s(system: System) -> float:
    """Rate at which the CPU reads experts [byte/s]; 0 on a system without one."""
    cpu, engine = system.cpu, system.engine
    if cpu is None:
        return 0.0
    if engine is not None and engine.cpu_efficiency is not None and cpu.rates == "peak":
        cpu = cpu.model_copy(update={"dram_efficiency": engine.cpu_efficiency})
    return cpu.effective_dram_bandwidth_bytes_per_s


def dram_efficiency(ndp: NdpSpec) -> float:
    """Share of the peak DRAM rate that streaming reads reach: given, or derived from timings and mapping.

    Forms and their measured errors: Ramulator 2 streams, see ``kernels/dram.py``.
    """
    if ndp.dram_efficiency is not None:
        return ndp.dram_efficiency
    memory = ndp.dram_spec
    if memory is None:
        raise SpecError(f"ndp {ndp.name}: needs dram_efficiency, or dram with mapping")
    mapping = _MAPPINGS[ndp.mapping or "row-by-row"]
    if mapping == dram.BANK_GROUP_LIMITED and memory.pseudo_channels > 1:
        raise SpecError(
            f"ndp {ndp.name}: mapping bank-group-limited is known for one pseudo-channel, {memory.name} has"
            f" {memory.pseudo_channels}; use another mapping, or give dram_efficiency"
        )
    return float(
        dram.stream_fraction(
            mapping,
            memory.row_bytes / memory.line_bytes,
            memory.n_bl,
            memory.n_ccd_l,
            memory.n_rtp,
            memory.n_rp,
            memory.n_rcd,
            memory.n_rfc,
            memory.n_refi,
            memory.pseudo_channels,
            ndp.read_buffer or DEFAULT_READ_BUFFER,
        )
    )


def ndp_bytes_per_s(system: System) -> float:
    """Effective DRAM rate of the near-data device [byte/s]; 0 on a system without one."""
    if system.ndp is None:
        return 0.0
    return system.ndp.dram_bandwidth_bytes_per_s * dram_efficiency(system.ndp)


def _device_rates(gpu: GpuSpec, dtype: str, values: list[Any]) -> None:
    """Places of the GPU that its own spec fills."""
    launch_s = 0.0 if gpu.layer_overhead_s is not None else gpu.launch_overhead_s
    values[place.GPU_FLOPS] = gpu.effective_flops_per_s(dtype)
    values[place.GPU_BANDWIDTH] = values[place.EXPERT_BANDWIDTH] = gpu.effective_memory_bandwidth_bytes_per_s
    values[place.GPU_N_HALF] = values[place.EXPERT_N_HALF] = gpu.memory_n_half_bytes
    values[place.LAUNCH_OVERHEAD] = values[place.EXPERT_LAUNCH] = launch_s
    values[place.LAYER_OVERHEAD] = 0.0 if gpu.layer_overhead_s is None else gpu.layer_overhead_s
    values[place.BATCHED_FROM] = math.inf


def _engine_rates(gpu: GpuSpec, engine: EngineSpec, peer_bytes_per_s: float, dtype: str, values: list[Any]) -> None:
    """Places of the GPU under an engine, see `perfmodel.hardware.EngineSpec`."""
    peak = gpu.memory_bandwidth_bytes_per_s
    share = engine.memory_efficiency if engine.expert_efficiency is None else engine.expert_efficiency
    n_half = engine.memory_n_half_bytes * gpu.sharing
    single = engine.experts == "single"
    values[place.GPU_FLOPS] = gpu.peak_flops_per_s(dtype) * engine.compute_efficiency
    values[place.GPU_BANDWIDTH] = peak * engine.memory_efficiency
    values[place.EXPERT_BANDWIDTH] = peak * share
    values[place.GPU_N_HALF] = n_half
    values[place.EXPERT_N_HALF] = n_half if single else 0.0
    values[place.EXPERT_LAUNCH] = engine.kernel_s if single else 0.0
    several = np.greater(gpu.sharing, 1)
    reduction_s = engine.all_reduce_s if gpu.peer_bandwidth_gb_per_s is None else engine.peer_all_reduce_s
    values[place.LAYER_OVERHEAD] = np.where(several, 2.0 * reduction_s, 0.0)[()]
    # A ring reduces in 2 (n - 1) steps, in each of which a GPU sends the n-th part.
    sent = 2.0 * (gpu.sharing - 1) / gpu.sharing
    values[place.PER_REDUCED_BYTE] = np.where(several, sent / peer_bytes_per_s, 0.0)[()]
    switch = engine.batched_from_tokens
    values[place.BATCHED_FROM] = math.inf if switch is None else switch
    values[place.BATCHED_FIXED] = engine.batched_layer_s
    values[place.EXPERT_TILE] = 0.0 if engine.expert_tile_tokens is None else engine.expert_tile_tokens
    values[place.ATTENTION_FIXED] = engine.attention_kernels * engine.kernel_s
    values[place.RECURRENT_FIXED] = engine.recurrent_kernels * engine.kernel_s
    values[place.EXPERTS_FIXED] = engine.expert_kernels * engine.kernel_s
    values[place.MATRIX_FIXED] = 0.0 if single else n_half / (peak * share)
    values[place.DENSE_FIXED] = engine.dense_kernels * engine.kernel_s
    values[place.STEP_FIXED] = engine.step_s
    values[place.SEQUENCE_FIXED] = engine.sequence_s


def _cpu_rates(cpu: CpuSpec, engine: EngineSpec | None, values: list[Any]) -> None:
    """Places of the arithmetic of the CPU."""
    if cpu.rates == "reached":
        engine = None
    if engine is not None and engine.cpu_compute_efficiency is not None:
        cpu = cpu.model_copy(update={"compute_efficiency": engine.cpu_compute_efficiency})
    if engine is not None and engine.cpu_units == "vector" and cpu.vector_tflop_per_s is not None:
        values[place.CPU_FLOPS] = cpu.effective_vector_flops_per_s
        values[place.CPU_TILE] = 1.0
        return
    values[place.CPU_FLOPS] = cpu.effective_flops_per_s()
    values[place.CPU_VECTOR_FLOPS] = cpu.effective_vector_flops_per_s
    values[place.CPU_TILE] = 1.0 if cpu.tile_rows is None else cpu.tile_rows
    values[place.CPU_PACK] = cpu.effective_pack_bytes_per_s


def _places(system: System, dtype: str) -> list[Any]:
    """Value of every place of the point; arrays where the system holds arrays (see `hardware_points`).

    A calibrated overhead per layer replaces the launches of the layer, so the overhead of a launch is then zero.
    """
    gpu, link, ndp, cpu, host = system.gpu, system.link, system.ndp, system.cpu, system.host
    values: list[Any] = [0.0] * place.POINT_SIZE
    if system.engine is None:
        _device_rates(gpu, dtype, values)
    else:
        peer = link.effective_bandwidth_bytes_per_s if gpu.peer_bytes_per_s is None else gpu.peer_bytes_per_s
        _engine_rates(gpu, system.engine, peer, dtype, values)
    values[place.LINK_BANDWIDTH] = link_bytes_per_s(system)
    values[place.LINK_LATENCY] = link.latency_s
    values[place.LINK_N_HALF] = link.n_half_bytes
    if cpu is not None:
        _cpu_rates(cpu, system.engine, values)
        values[place.CPU_BANDWIDTH] = cpu_bytes_per_s(system)
        values[place.CPU_OVERHEAD] = cpu.expert_overhead_s
    if host is not None:
        values[place.ROUND_TRIP] = host.round_trip_s
        values[place.COPY_OVERHEAD] = host.copy_overhead_s
    if system.engine is not None:
        for at, seconds in (
            (place.ROUND_TRIP, system.engine.round_trip_s),
            (place.COPY_OVERHEAD, system.engine.copy_overhead_s),
        ):
            values[at] = values[at] if seconds is None else seconds
    if ndp is not None:
        values[place.NDP_BANDWIDTH] = ndp_bytes_per_s(system)
        values[place.NDP_ARRAYS] = ndp.arrays
        values[place.NDP_ROWS] = ndp.rows
        values[place.NDP_COLS] = ndp.cols
        values[place.NDP_CLOCK] = ndp.clock_hz
        values[place.NDP_DATAFLOW] = systolic.DATAFLOWS[ndp.dataflow]
        values[place.NDP_SCALE_BITS] = ndp.scale_bits_per_weight
        values[place.NDP_SCALING] = _SCALINGS[ndp.precision_scaling]
        rates = [1.0, *(ndp.array_rate(bits) for bits in range(1, place.MAX_RATE_BITS + 1))]
        values[place.NDP_RATES : place.NDP_RATES + len(rates)] = rates
    return values


def hardware_point(system: System, dtype: str = "fp16") -> NDArray[np.float64]:
    """The vector that kernels read [POINT_SIZE]; its places are named in ``kernels/point.py``."""
    return np.array(_places(system, dtype), dtype=np.float64)


def hardware_points(system: System, values: Mapping[str, ArrayLike], dtype: str = "fp16") -> Points:
    """Points of a system with other values at dotted keys: all of them at once, by the rules of `hardware_point`.

    Parameters
    ----------
    system : everything that does not vary.
    values : arrays of one broadcast shape, in the units of the spec file. Not validated, so that a chunk of a
        sweep costs array arithmetic only: check the range of every axis beforehand.
    dtype : compute type on the GPU.

    Returns
    -------
    Points of the broadcast shape, flattened in C order. Every point equals the `hardware_point` of the system with
    those values, bit for bit.
    """
    arrays = {key: np.asarray(value, dtype=np.float64) for key, value in values.items()}
    shape = np.broadcast_shapes(*(array.shape for array in arrays.values()), (1,))
    found = _places(_with_arrays(system, without_timings(system, arrays)), dtype)
    varying = [i for i, value in enumerate(found) if isinstance(value, np.ndarray)]
    base = np.array([0.0 if i in varying else value for i, value in enumerate(found)], dtype=np.float64)
    table = np.empty((len(varying), *shape))
    for row, i in zip(table, varying, strict=True):
        row[...] = found[i]
    return Points(base, np.array(varying, dtype=np.int64), table.reshape(len(varying), math.prod(shape)))


def without_timings(
    system: System, arrays: dict[str, NDArray[np.float64]], refused: dict[str, NDArray[np.bool_]] | None = None
) -> dict[str, NDArray[np.float64]]:
    """DRAM timings turned into the efficiency that follows from them, one distinct combination at a time.

    refused : where given, combinations that contradict each other get some efficiency and are marked here: by reason,
        without its numbers, where they stand. So are more populated memory channels of a CPU than it has.

    Raises
    ------
    SpecError : without ``refused``, the first combination that contradicts itself.
    """
    arrays = _with_channels(system, arrays, refused)
    timings = {key: array for key, array in arrays.items() if key.startswith(TIMINGS)}
    if not timings:
        return arrays
    together = np.broadcast_arrays(*timings.values())
    rows = np.stack([array.reshape(-1) for array in together], axis=1)
    distinct, inverse = np.unique(rows, axis=0, return_inverse=True)
    efficiency = np.ones(len(distinct))
    reasons: dict[str, list[int]] = {}
    for i, row in enumerate(distinct.tolist()):
        try:
            ndp = system.with_values(dict(zip(timings, row, strict=True))).ndp
            assert ndp is not None  # a system without the device has none of these keys
            efficiency[i] = dram_efficiency(ndp)
        except SpecError as error:
            if refused is None:
                raise
            reasons.setdefault(_NUMBERS.sub("...", str(error)), []).append(i)
    where, shape = inverse.reshape(-1), together[0].shape
    if refused is not None:
        refused |= {reason: np.isin(where, rows).reshape(shape) for reason, rows in reasons.items()}
    others = {key: array for key, array in arrays.items() if key not in timings}
    return {**others, "ndp.dram_efficiency": efficiency[where].reshape(shape)}


def _with_channels(
    system: System, arrays: dict[str, NDArray[np.float64]], refused: dict[str, NDArray[np.bool_]] | None
) -> dict[str, NDArray[np.float64]]:
    """Memory in no more channels than a CPU has; the points at which it is refused, as in `without_timings`."""
    if system.cpu is None or not any(key in arrays for key in _CHANNELS):
        return arrays
    own = (system.cpu.memory_channels, system.cpu.populated_channels)
    channels, populated = (arrays.get(key, given) for key, given in zip(_CHANNELS, own, strict=True))
    if channels is None or populated is None:
        return arrays
    too_many = np.greater(populated, channels)
    if not too_many.any():
        return arrays
    reason = f"cpu {system.cpu.name}: populated_channels is above memory_channels"
    if refused is None:
        raise SpecError(reason)
    refused[reason] = too_many
    return {**arrays, _CHANNELS[1]: np.minimum(populated, channels)}


def _with_arrays(system: System, arrays: Mapping[str, NDArray[np.float64]]) -> System:
    """A system whose specs hold arrays; only for `_places`, since nothing of it is validated."""
    changed: dict[str, dict[str, Any]] = {}
    for key, array in arrays.items():
        part, _, inner = key.partition(".")
        name, _, entry = inner.partition(".")
        fields = changed.setdefault(part, {})
        if entry:
            fields[name] = {**fields.get(name, getattr(getattr(system, part), name)), entry: array}
        else:
            fields[name] = array
    parts = {part: getattr(system, part).model_copy(update=fields) for part, fields in changed.items()}
    return system.model_copy(update=parts)
