"""One system as the numbers that kernels read, in SI units and after derating."""

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import SpecError
from perfmodel.hardware import NdpSpec, System
from perfmodel.kernels import dram, replay, systolic

_SCALINGS = {"none": replay.SCALING_NONE, "linear": replay.SCALING_LINEAR, "native": replay.SCALING_NATIVE}


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
    refresh = dram.refresh_fraction(memory.n_rtp, memory.n_rp, memory.n_rfc, memory.n_rcd, memory.n_refi)
    if ndp.mapping == "bank-group-interleaved":
        return float(refresh)
    lines = memory.row_bytes / memory.line_bytes
    if ndp.mapping == "row-by-row":
        share = dram.row_by_row_fraction(
            lines,
            memory.n_bl,
            memory.n_ccd_l,
            memory.n_rtp,
            memory.n_rp,
            memory.n_rcd,
            memory.pseudo_channels,
        )
    else:
        share = dram.bank_group_limited_fraction(
            lines, memory.n_bl, memory.n_ccd_l, memory.n_rp, memory.n_rcd, ndp.read_buffer
        )
    return float(share * refresh)


def ndp_bytes_per_s(system: System) -> float:
    """Effective DRAM rate of the near-data device [byte/s]; 0 on a system without one."""
    if system.ndp is None:
        return 0.0
    return system.ndp.dram_bandwidth_bytes_per_s * dram_efficiency(system.ndp)


def hardware_point(system: System, dtype: str = "fp16") -> NDArray[np.float64]:
    """The vector that kernels read; its places are named in ``kernels/replay.py``.

    A calibrated overhead per layer replaces the launches of the layer, so the overhead of a launch is then zero.
    """
    gpu, link, ndp = system.gpu, system.link, system.ndp
    point = np.zeros(replay.POINT_SIZE, dtype=np.float64)
    point[replay.GPU_FLOPS] = gpu.effective_flops_per_s(dtype)
    point[replay.GPU_BANDWIDTH] = gpu.effective_memory_bandwidth_bytes_per_s
    point[replay.GPU_N_HALF] = gpu.memory_n_half_bytes
    point[replay.LAUNCH_OVERHEAD] = 0.0 if gpu.layer_overhead_s is not None else gpu.launch_overhead_s
    point[replay.LAYER_OVERHEAD] = gpu.layer_overhead_s or 0.0
    point[replay.LINK_BANDWIDTH] = link_bytes_per_s(system)
    point[replay.LINK_LATENCY] = link.latency_s
    point[replay.LINK_N_HALF] = link.n_half_bytes
    if ndp is not None:
        point[replay.NDP_BANDWIDTH] = ndp_bytes_per_s(system)
        point[replay.NDP_ARRAYS] = ndp.arrays
        point[replay.NDP_ROWS] = ndp.rows
        point[replay.NDP_COLS] = ndp.cols
        point[replay.NDP_CLOCK] = ndp.clock_hz
        point[replay.NDP_DATAFLOW] = systolic.DATAFLOWS[ndp.dataflow]
        point[replay.NDP_SCALE_BITS] = ndp.scale_bits_per_weight
        point[replay.NDP_SCALING] = _SCALINGS[ndp.precision_scaling]
        point[replay.NDP_RATES : replay.NDP_RATES + 17] = [
            1.0,
            *(ndp.array_rate(bits) for bits in range(1, 17)),
        ]
    return point
