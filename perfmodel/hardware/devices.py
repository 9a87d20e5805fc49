"""Specs of single devices and links: GPU, link, DRAM, near-data device.

Fields carry the units people use, in their names; properties without such a suffix are SI.
"gb" is 1e9 bytes, "kb" is 1e3 bytes, "tflop" is 1e12 operations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from perfmodel.errors import SpecError
from perfmodel.hardware.base import Frozen, Spec, number, shown

Dtype = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8"]
Dataflow = Literal["os", "ws", "is"]
BankMapping = Literal["row-by-row", "bank-group-interleaved", "bank-group-limited"]
PrecisionScaling = Literal["none", "linear", "native"]
Split = Literal["tensor", "layer"]

_PEAK_TFLOP = number("TFLOP/s", 1e-4, 1e5, "dense peak of one dtype")
PeakTable = Annotated[dict[Dtype, Annotated[float, _PEAK_TFLOP]], Frozen]
RateTable = Annotated[dict[str, Annotated[float, number("1", 1e-2, 64, "rate relative to FP16")]], Frozen]

GB = 1e9
KB = 1e3
US = 1e-6
TERA = 1e12


def efficiency(text: str, default: Any = ...) -> Any:
    # The lower bound keeps times finite; nothing real runs at a millionth of its peak.
    return number("1", 1e-6, 1, f"{text}, as a share of the peak", default)


def peak_of(spec: Spec, peaks: Mapping[Dtype, float], dtype: object) -> float:
    """Peak of ``dtype`` in a table of a spec [flop/s]; `SpecError` when it is not there."""
    table = {str(key): value for key, value in peaks.items()}
    if not isinstance(dtype, str) or dtype not in table:
        raise SpecError(
            f"{spec.label()} {spec.name!r} has no peak for dtype {shown(dtype)}; it has: {', '.join(table)}"
        )
    return table[dtype] * TERA


class GpuSpec(Spec):
    """A GPU, or several equal ones.

    Rates follow ``achieved = peak * efficiency * b / (b + n_half)`` for a kernel that moves ``b`` bytes. A
    measured ``layer_overhead_us`` replaces launches times ``launch_overhead_us``; it never adds to it.

    Several ``devices`` have the memory of all. Split by ``tensor`` they share every layer and run at their joint
    rates, each with its own ``n_half``; split by ``layer`` they work one after another, at the rates of one.
    """

    kind: Literal["gpu"] = "gpu"
    devices: int = number("1", 1, 1024, "equal GPUs", 1)
    split: Split = Field("tensor", description="what several GPUs share: every layer, or the layers among them")
    peer_bandwidth_gb_per_s: float | None = number(
        "GB/s", 0.01, 20_000, "rate from one of several GPUs to another; without it that of the link", None
    )
    memory_capacity_gb: float = number("GB", 0.1, 10_000, "memory size")
    memory_bandwidth_gb_per_s: float = number("GB/s", 1, 50_000, "peak memory bandwidth")
    memory_efficiency: float = efficiency("achieved memory bandwidth")
    memory_n_half_kb: float = number("kB", 0, 1e7, "bytes at which a kernel reaches half the rate", 0.0)
    peak_tflop_per_s: PeakTable = Field(
        description="dense peaks by dtype; fp16 is required", json_schema_extra={"unit": "TFLOP/s"}
    )
    compute_efficiency: float = efficiency("achieved compute rate")
    launch_overhead_us: float = number("us", 0, 1e5, "fixed time per kernel launch")
    layer_overhead_us: float | None = number("us", 0, 1e6, "fixed time per layer, replacing launches", None)

    @field_validator("peak_tflop_per_s")
    @classmethod
    def _has_fp16(cls, table: dict[str, float]) -> dict[str, float]:
        if "fp16" not in table:
            raise ValueError("fp16 is missing; a GPU needs at least that peak")
        return table

    @property
    def memory_capacity_bytes(self) -> float:
        """Memory size of all GPUs [byte]."""
        return self.memory_capacity_gb * GB * self.devices

    @property
    def sharing(self) -> int:
        """GPUs that work on a layer at the same time [1]."""
        return self.devices if self.split == "tensor" else 1

    @property
    def memory_bandwidth_bytes_per_s(self) -> float:
        """Peak memory bandwidth of the GPUs that share a layer [byte/s]."""
        return self.memory_bandwidth_gb_per_s * GB * self.sharing

    @property
    def effective_memory_bandwidth_bytes_per_s(self) -> float:
        """Peak times efficiency [byte/s]."""
        return self.memory_bandwidth_bytes_per_s * self.memory_efficiency

    @property
    def peer_bytes_per_s(self) -> float | None:
        """Rate from one of several GPUs to another [byte/s], or ``None`` where they meet over the link."""
        return None if self.peer_bandwidth_gb_per_s is None else self.peer_bandwidth_gb_per_s * GB

    @property
    def memory_n_half_bytes(self) -> float:
        """Bytes a kernel must move to reach half the effective bandwidth, over the GPUs that share it [byte]."""
        return self.memory_n_half_kb * KB * self.sharing

    def peak_flops_per_s(self, dtype: str = "fp16") -> float:
        """Dense peak of ``dtype`` of the GPUs that share a layer [flop/s]; `SpecError` when the spec lacks it."""
        return peak_of(self, self.peak_tflop_per_s, dtype) * self.sharing

    def effective_flops_per_s(self, dtype: str = "fp16") -> float:
        """Peak of ``dtype`` times compute efficiency [flop/s]."""
        return self.peak_flops_per_s(dtype) * self.compute_efficiency

    @property
    def launch_overhead_s(self) -> float:
        """Fixed time per kernel launch [s]."""
        return self.launch_overhead_us * US

    @property
    def layer_overhead_s(self) -> float | None:
        """Fixed time per layer [s], or ``None`` when launches are counted instead."""
        return None if self.layer_overhead_us is None else self.layer_overhead_us * US


class LinkSpec(Spec):
    """A link between two devices: ``time = latency + (bytes + n_half) / (bandwidth * efficiency)``."""

    kind: Literal["link"] = "link"
    bandwidth_gb_per_s: float = number("GB/s", 0.01, 5000, "peak in one direction, after line coding")
    efficiency: float = efficiency("achieved bandwidth of large transfers")
    latency_us: float = number("us", 0, 1e5, "one-way latency")
    n_half_kb: float = number("kB", 0, 1e7, "transfer size at which half the rate is reached", 0.0)
    duplex: Literal["full", "half"] = Field(description="whether both directions run at full rate at once")

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Peak in one direction [byte/s]."""
        return self.bandwidth_gb_per_s * GB

    @property
    def effective_bandwidth_bytes_per_s(self) -> float:
        """Peak times efficiency [byte/s]."""
        return self.bandwidth_bytes_per_s * self.efficiency

    @property
    def latency_s(self) -> float:
        """One-way latency [s]."""
        return self.latency_us * US

    @property
    def n_half_bytes(self) -> float:
        """Transfer size that reaches half the effective bandwidth, latency aside [byte]."""
        return self.n_half_kb * KB


class DramSpec(Spec):
    """Organisation and timing of one DRAM channel; ``n_*`` are counts of clock cycles of ``tck_ns``.

    ``channel_bits``, ``line_bytes``, ``row_bytes`` and the banks are those of one pseudo-channel;
    ``peak_gb_per_s`` is the whole channel's. Peak, data rate and burst length must agree within 1 %.
    """

    kind: Literal["dram"] = "dram"
    data_rate_mt_s: float = number("MT/s", 100, 100_000, "transfers per second and pin")
    channel_bits: int = number("bit", 1, 4096, "data pins of one pseudo-channel")
    pseudo_channels: int = number("1", 1, 64, "pseudo-channels of one channel")
    line_bytes: int = number("byte", 1, 4096, "bytes of one access")
    row_bytes: int = number("byte", 1, 1 << 20, "bytes of one open row")
    tck_ns: float = number("ns", 0.01, 100, "clock period")
    n_bl: int = number("tCK", 1, 1000, "data bus time of one access")
    n_ccd_s: int = number("tCK", 1, 1000, "access to access, other bank group")
    n_ccd_l: int = number("tCK", 1, 1000, "access to access, same bank group")
    n_rcd: int = number("tCK", 1, 10_000, "activate to read")
    n_rp: int = number("tCK", 1, 10_000, "precharge to activate")
    n_rtp: int = number("tCK", 1, 10_000, "read to precharge")
    n_rfc: int = number("tCK", 1, 1_000_000, "one all-bank refresh")
    n_refi: int = number("tCK", 1, 10_000_000, "interval between refreshes")
    n_rc: int = number("tCK", 1, 10_000, "activate to activate, same bank")
    n_faw: int = number("tCK", 1, 10_000, "window of four activates")
    n_rrd_s: int = number("tCK", 1, 10_000, "activate to activate, other bank group")
    bank_groups: int = number("1", 1, 1024, "bank groups")
    banks_per_group: int = number("1", 1, 1024, "banks in a bank group")
    peak_gb_per_s: float = number("GB/s", 0.01, 50_000, "pin bandwidth of one channel")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from_pins = self.data_rate_mt_s * 1e6 * self.channel_bits / 8 * self.pseudo_channels / GB
        from_burst = self.line_bytes * self.pseudo_channels / (self.n_bl * self.tck_ns)
        for what, value in (
            ("data_rate_mt_s * channel_bits * pseudo_channels / 8", from_pins),
            ("line_bytes * pseudo_channels / (n_bl * tck_ns)", from_burst),
        ):
            if abs(value / self.peak_gb_per_s - 1) > 0.01:
                raise ValueError(f"peak_gb_per_s is {self.peak_gb_per_s:g}, but {what} gives {value:.6g} GB/s")
        if self.row_bytes % self.line_bytes:
            raise ValueError(f"row_bytes is {self.row_bytes}; allowed: a multiple of line_bytes ({self.line_bytes})")
        if self.n_ccd_l < self.n_ccd_s:
            raise ValueError(f"n_ccd_l is {self.n_ccd_l}; allowed: at least n_ccd_s ({self.n_ccd_s})")
        busy = self.n_rtp + self.n_rp + self.n_rfc + self.n_rcd
        if busy >= self.n_refi:
            raise ValueError(f"n_refi is {self.n_refi}; allowed: more than n_rtp + n_rp + n_rfc + n_rcd ({busy})")
        return self

    @property
    def lines_per_row(self) -> int:
        """Accesses that one open row serves."""
        return self.row_bytes // self.line_bytes

    @property
    def tck_s(self) -> float:
        """Clock period [s]."""
        return self.tck_ns * 1e-9

    @property
    def peak_bytes_per_s(self) -> float:
        """Pin bandwidth of one channel [byte/s]."""
        return self.peak_gb_per_s * GB


class NdpSpec(Spec):
    """A memory device that computes near its data with systolic arrays.

    Its DRAM bandwidth has either a given ``dram_efficiency``, or one that follows from a DRAM organisation
    (``dram``) and the way weights are laid out in it (``mapping``). ``precision_scaling`` says how fewer bits
    speed up the arrays: not at all, by 16/bits, or by a table (``native_rate_by_bits``).
    """

    kind: Literal["ndp"] = "ndp"
    capacity_gb: float = number("GB", 0.1, 1e6, "memory size")
    dram_bandwidth_gb_per_s: float = number("GB/s", 0.1, 50_000, "peak internal bandwidth")
    dram_efficiency: float | None = efficiency("achieved internal bandwidth", None)
    dram: DramSpec | None = Field(None, description="DRAM organisation: a name, a .toml file or a table")
    mapping: BankMapping | None = Field(None, description="how a weight stream is laid out over the banks")
    read_buffer: int | None = number("1", 1, 65_536, "accesses the controller looks ahead", None)
    arrays: int = number("1", 1, 1_000_000, "systolic arrays")
    rows: int = number("1", 1, 65_536, "rows of one array")
    cols: int = number("1", 1, 65_536, "columns of one array")
    clock_ghz: float = number("GHz", 1e-3, 20, "clock of the arrays")
    dataflow: Dataflow = Field(description="output, weight or input stationary")
    precision_scaling: PrecisionScaling = Field(description="how fewer bits speed up the arrays")
    native_rate_by_bits: RateTable | None = Field(
        None,
        description="speed-up over FP16 by stored bits, only with 'native'",
        json_schema_extra={"unit": "1"},
    )
    scale_bits_per_weight: float = number("bit", 0, 16, "stored bits per weight of quantisation scales", 0.0)

    parts: ClassVar[tuple[str, ...]] = ("dram",)

    @field_validator("native_rate_by_bits")
    @classmethod
    def _bits_are_numbers(cls, table: dict[str, float] | None) -> dict[str, float] | None:
        if table is not None and not table:
            raise ValueError('the table is empty; give at least one entry such as "4" = 4.0')
        for bits in table or ():
            if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,4})?", bits) or not 0 < float(bits) <= 32:
                raise ValueError(f"{shown(bits)} is not a number of bits; allowed: above 0 up to 32")
        return table

    @model_validator(mode="after")
    def _one_derate(self) -> Self:
        derived = self.dram is not None and self.mapping is not None
        loose = [key for key in ("dram", "mapping", "read_buffer") if getattr(self, key) is not None]
        if self.dram_efficiency is not None and loose:
            raise ValueError(f"dram_efficiency and {', '.join(loose)} exclude each other; give one or the other")
        if self.dram_efficiency is None and not derived:
            raise ValueError("give either dram_efficiency, or both dram and mapping")
        native = self.precision_scaling == "native"
        if native != (self.native_rate_by_bits is not None):
            raise ValueError("native_rate_by_bits is required with precision_scaling = 'native', and only then")
        return self

    def _make_room(self, data: dict[str, Any], changed: Mapping[str, Any]) -> None:
        if "dram_efficiency" in changed:
            for key in ("dram", "mapping", "read_buffer"):
                data.pop(key, None)
        elif "dram" in changed and "mapping" in changed:
            data.pop("dram_efficiency", None)
        if changed.get("precision_scaling", "native") != "native":
            data.pop("native_rate_by_bits", None)

    @property
    def dram_spec(self) -> DramSpec | None:
        """The DRAM organisation the bandwidth is derived from, or ``None`` when the efficiency is given."""
        return self.dram

    @property
    def capacity_bytes(self) -> float:
        """Memory size [byte]."""
        return self.capacity_gb * GB

    @property
    def dram_bandwidth_bytes_per_s(self) -> float:
        """Peak internal bandwidth [byte/s], before any derate."""
        return self.dram_bandwidth_gb_per_s * GB

    @property
    def clock_hz(self) -> float:
        """Clock of the arrays [1/s]."""
        return self.clock_ghz * 1e9

    @property
    def peak_flops_per_s(self) -> float:
        """FP16 peak, two operations per cell and cycle: ``2 * arrays * rows * cols * clock`` [flop/s]."""
        return 2.0 * self.arrays * self.rows * self.cols * self.clock_hz

    def array_rate(self, bits: float) -> float:
        """Speed-up of the arrays over FP16 for weights of ``bits`` stored bits [1].

        1 for ``none``; ``16 / bits`` for ``linear``; for ``native`` the entry of the narrowest format that
        holds the weight (3 bits run as 4), and 1 for weights wider than every entry. Raises `SpecError`
        unless ``bits`` is above 0 and at most 32.
        """
        if not 0 < bits <= 32:
            raise SpecError(f"{self.label()} {self.name!r}: bits is {shown(bits)}; allowed: above 0 up to 32")
        if self.precision_scaling == "none":
            return 1.0
        if self.native_rate_by_bits is None:
            return 16.0 / bits
        wide_enough = [(float(key), rate) for key, rate in self.native_rate_by_bits.items() if float(key) >= bits]
        return min(wide_enough, key=lambda entry: entry[0])[1] if wide_enough else 1.0
