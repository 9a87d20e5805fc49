"""What a model needs of the memory of each device, and whether it fits."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from perfmodel.errors import PlacementError
from perfmodel.hardware import System
from perfmodel.memory.parallel import Parallel
from perfmodel.memory.request import Options, Request, checked
from perfmodel.memory.sums import Device, Sums
from perfmodel.model import MoEModel
from perfmodel.model.cache import MlaCache
from perfmodel.reference import transfer_time

#: What makes each use smaller.
_ADVICE = {
    "experts": "fewer experts there or of fewer bits",
    "weights": "weights of fewer bits or on more GPUs",
    "kv": "a smaller batch or context",
    "replicas": "fewer replicas",
    "activations": "fewer tokens at once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Memory by device.

    model, system : their names. policy : the policy with all its options, or None.
    context : tokens of context of each sequence [token]. batch : sequences in all.
    kv_bits, kv_layout, mla_cache : how the cache is kept, see `MoEModel.kv_bytes`.
    gpu_experts : experts of every MoE layer on the GPUs, all of them together; None for all.
    replica_bits : widths of the quantised copies of every expert behind the link [bit].
    devices : the GPU that holds most, and what is behind the link where anything is kept there.
    load_s : time to bring weights over the link once, by what they are, each as one long transfer [s].
    notes : sentences on what is assumed or not checked.
    """

    model: str
    system: str
    policy: str | None
    context: int
    batch: int
    kv_bits: float
    kv_layout: str
    mla_cache: MlaCache
    parallel: Parallel
    gpu_experts: int | None
    replica_bits: tuple[float, ...]
    devices: tuple[Device, ...]
    load_s: dict[str, float]
    notes: tuple[str, ...]

    @property
    def gpu(self) -> Device:
        """The GPU that holds most."""
        return self.devices[0]

    @property
    def behind(self) -> Device | None:
        """What is behind the link; None where nothing is kept there."""
        return self.devices[1] if len(self.devices) > 1 else None

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must, as far as capacities are stated."""
        return all(device.fits is not False for device in self.devices)

    def check(self) -> None:
        """Refuse what does not fit.

        Raises
        ------
        PlacementError : with the whole sum of each device that is too small, its capacity and what to change.
        """
        short = [_shortage(device) for device in self.devices if device.fits is False]
        if short:
            sequences = "1 sequence" if self.batch == 1 else f"{self.batch} sequences"
            raise PlacementError(f"{self.model} with {sequences} of {self.context} tokens: {'; '.join(short)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; units are part of the names."""
        values: dict[str, Any] = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name not in ("devices", "parallel")
        }
        values |= {key: list(values[key]) for key in ("replica_bits", "notes")}
        values["load_s"] = dict(self.load_s)
        values["parallel"] = dataclasses.asdict(self.parallel)
        values["fits"] = self.fits
        values["devices"] = [
            {
                "role": device.role,
                "name": device.name,
                "parts": [dataclasses.asdict(part) for part in device.parts],
                "bytes_by_use": dict(device.by_use()),
                "use_bytes": device.use_bytes,
                "capacity_bytes": device.capacity_bytes,
                "headroom_bytes": device.headroom_bytes,
                "fits": device.fits,
            }
            for device in self.devices
        ]
        return values


def _shortage(device: Device) -> str:
    """What does not fit a device: the sum, the capacity, and what would change it."""
    assert device.capacity_bytes is not None
    uses = {use: size for use, size in device.by_use().items() if size}
    terms = " + ".join(f"{use} {size / 1e9:.2f}" for use, size in uses.items())
    largest_first = sorted(uses, key=lambda use: -uses[use])
    advice = [_ADVICE[use] for use in largest_first if use in _ADVICE][:2]
    return (
        f"{terms} = {device.use_bytes / 1e9:.2f} GB do not fit {device.name}, capacity "
        f"{device.capacity_bytes / 1e9:.2f} GB; use {', or '.join([*advice, 'a device with more memory'])}"
    )


def memory_report(
    model: MoEModel | str | Path, system: System | str | Path, **options: Unpack[Options]
) -> MemoryReport:
    """The memory that a model needs on a system, by device and by use, without any trace.

    Weights count with all parameters at their stored bits, never with the active ones. The GPU also holds the cache of
    every sequence, and estimates of activations and of what driver and libraries take; the check of a priced run
    (`Run.memory`) is for one sequence of the trace and leaves these two estimates out, so it lets more pass.

    Parameters
    ----------
    options : see `Options`.

    Raises
    ------
    ModelConfigError : an option is not such a value, or a policy needs the same experts in every layer. PolicyError :
        the policy is unknown, has a bad option, or cannot run on this system. PlacementError : the parallel degrees do
        not suit the model. What does not fit is no error before `MemoryReport.check`.
    """
    request = checked(model, system, options)
    sums = Sums(request)
    kept = sums.kept(request.context, request.batch)
    devices = sums.devices(request.context, request.batch, kept)
    return MemoryReport(
        model=request.model.name,
        system=request.system.name,
        policy=None if request.policy is None else request.policy.spec,
        context=request.context,
        batch=request.batch,
        kv_bits=request.kv_bits,
        kv_layout=request.kv_layout,
        mla_cache=request.mla_cache,
        parallel=request.parallel,
        gpu_experts=kept.per_layer,
        replica_bits=kept.replica_bits,
        devices=devices,
        load_s=_load_times(request, devices),
        notes=(*request.notes, *_notes(request, devices)),
    )


def _load_times(request: Request, devices: tuple[Device, ...]) -> dict[str, float]:
    """Time of one long transfer over the link for what crosses it at the start [s].

    The GPU's weights do, and everything on a near-data device; host memory is on this side of it.
    """
    link = request.system.link
    sizes = {f"{use} on the GPU": devices[0].by_use().get(use, 0.0) for use in ("weights", "experts")}
    for device in devices[1:]:
        if device.role == "near-data":
            sizes |= {f"{use} on the near-data device": size for use, size in device.by_use().items()}
    return {
        name: transfer_time(size, link.effective_bandwidth_bytes_per_s, link.latency_s, link.n_half_bytes)
        for name, size in sizes.items()
    }


def _notes(request: Request, devices: tuple[Device, ...]) -> tuple[str, ...]:
    notes = []
    parallel = request.parallel
    if parallel.ranks > 1:
        notes.append(
            f"the fullest of {parallel.ranks} GPUs: experts and key-value heads are not cut, other matrices evenly"
        )
    if request.policy is not None and request.gpu_experts is not None:
        notes.append(f"{request.gpu_experts} experts of a layer on the GPU instead of the policy's count")
    notes += [
        f"the memory of {device.name} is not stated, so it is not checked"
        for device in devices
        if device.capacity_bytes is None
    ]
    return tuple(notes)
