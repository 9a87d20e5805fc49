"""One system as the numbers that kernels read, in SI units and after derating."""

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.hardware import NdpSpec, System
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


def link_bytes_per_s(system: System) -> float:
    """Effective one-way rate of the link [byte/s]."""
    return system.link.effective_bandwidth_bytes_per_s


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


def hardware_point(system: System, dtype: str = "fp16") -> NDArray[np.float64]:
    """The vector that kernels read; its places are named in ``kernels/point.py``.

    A calibrated overhead per layer replaces the launches of the layer, so the overhead of a launch is then zero.
    """
    gpu, link, ndp = system.gpu, system.link, system.ndp
    point = np.zeros(place.POINT_SIZE, dtype=np.float64)
    point[place.GPU_FLOPS] = gpu.effective_flops_per_s(dtype)
    point[place.GPU_BANDWIDTH] = gpu.effective_memory_bandwidth_bytes_per_s
    point[place.GPU_N_HALF] = gpu.memory_n_half_bytes
    point[place.LAUNCH_OVERHEAD] = 0.0 if gpu.layer_overhead_s is not None else gpu.launch_overhead_s
    point[place.LAYER_OVERHEAD] = gpu.layer_overhead_s or 0.0
    point[place.LINK_BANDWIDTH] = link_bytes_per_s(system)
    point[place.LINK_LATENCY] = link.latency_s
    point[place.LINK_N_HALF] = link.n_half_bytes
    if ndp is not None:
        point[place.NDP_BANDWIDTH] = ndp_bytes_per_s(system)
        point[place.NDP_ARRAYS] = ndp.arrays
        point[place.NDP_ROWS] = ndp.rows
        point[place.NDP_COLS] = ndp.cols
        point[place.NDP_CLOCK] = ndp.clock_hz
        point[place.NDP_DATAFLOW] = systolic.DATAFLOWS[ndp.dataflow]
        point[place.NDP_SCALE_BITS] = ndp.scale_bits_per_weight
        point[place.NDP_SCALING] = _SCALINGS[ndp.precision_scaling]
        rates = [1.0, *(ndp.array_rate(bits) for bits in range(1, place.MAX_RATE_BITS + 1))]
        point[place.NDP_RATES : place.NDP_RATES + len(rates)] = rates
    return point
