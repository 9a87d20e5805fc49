"""What a measured run says it ran on: its engine, its machine, its model, and where its experts were.

Machines are the bundled specs, with what the run states of its own host; the engine is the profile of its name, or the
default profile of its kind where it has none (`PROFILES`). Nothing of the run's speed enters.
"""

import functools
from dataclasses import replace
from typing import TypeVar

from perfmodel.errors import SpecError
from perfmodel.evidence.measured import MeasuredRun, is_bundled, is_file
from perfmodel.hardware import CpuSpec, EngineSpec, GpuSpec, LinkSpec, Source, Spec, System, load_spec
from perfmodel.hardware.base import shown
from perfmodel.hardware.files import a_spec
from perfmodel.model import MoEModel
from perfmodel.storage import Storage

T = TypeVar("T")
Part = TypeVar("Part", bound=Spec)

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

#: Rate of copies from pageable memory: the lower end of 11 to 18 GB/s at which a host copies into a pinned buffer
#: (turboderp-org/exllamav3 PR 341); of a source that no counted run is of.
PAGEABLE_GB_PER_S = 11.0

#: The link of a run that names none; nothing but activations passes it then.
_ANY_LINK = "pcie-4.0-x16"


def needed(run: MeasuredRun, key: str, value: T | None) -> T:
    """A value that a prediction needs; SpecError where the run does not have it."""
    if value is None:
        raise SpecError(f"run {run.id}: key '{key}' is missing; a prediction needs it")
    return value


def profile_of(run: MeasuredRun) -> str:
    """Name of the profile that a run is predicted with: its engine's, or the default one of its kind.

    An engine that is neither a profile nor known gets that of graph engines, or of eager ones where experts are
    fetched, because that is what frameworks for it are.
    """
    engine = run.engine
    if engine is not None and (engine in PROFILES or is_file(engine) or is_bundled("engine", engine)):
        return PROFILES.get(engine, engine)
    return "moe-infinity" if run.elsewhere == "fetch" else "llama-cpp-cuda"


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


@functools.cache
def _part(name: str, kind: type[Part], of: str) -> Part:
    """A bundled or local spec of one kind."""
    found = load_spec(name)
    if not isinstance(found, kind):
        raise SpecError(f"{of} {shown(name)} is no {of} spec, but {a_spec(found.kind)}")
    return found


def engine_of(run: MeasuredRun) -> EngineSpec:
    """The profile of the run's engine, or the default one of its kind."""
    engine: EngineSpec = _part(profile_of(run), EngineSpec, "engine")
    return engine


def model_of(run: MeasuredRun) -> MoEModel:
    """The run's model at its stored bits, and with the number of experts a token that the run used."""
    expert, other = needed(run, "expert_bits", run.expert_bits), needed(run, "other_bits", run.other_bits)
    return _model(needed(run, "model", run.model), expert, other, run.head_bits, run.active_experts)


@functools.cache
def _model(name: str, expert: float, other: float, head: float | None, active: int | None) -> MoEModel:
    of_experts, of_head = Storage.uniform(expert).expert, Storage.uniform(head or other).head
    storage = replace(Storage.uniform(other), expert=of_experts, head=of_head)
    model = replace(MoEModel.from_config(name), storage=storage)
    if active is None:
        return model
    kinds = tuple(
        kind if kind.experts is None else replace(kind, experts=replace(kind.experts, top_k=active))
        for kind in model.feed_forward
    )
    return replace(model, feed_forward=kinds)


def system_of(run: MeasuredRun) -> System:
    """The run's machine under its engine; what the run states of copies and of reading experts comes before both."""
    engine = engine_of(run)
    gpu = needed(run, "gpu", run.gpu)
    system = _machine(gpu, run.devices, run.split, run.link, run.cpu, run.sockets, run.numa, run.dram_gb_per_s)
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
    gpu: str,
    devices: int,
    split: str | None,
    link: str | None,
    cpu: str | None,
    sockets: int | None,
    numa: str | None,
    dram_gb_per_s: float | None,
) -> System:
    """The devices of a run without its engine. dram_gb_per_s : of host memory, over all sockets [GB/s]."""
    card, wire = _part(gpu, GpuSpec, "gpu"), _part(link or _ANY_LINK, LinkSpec, "link")
    host = None if cpu is None else _part(cpu, CpuSpec, "cpu")
    if host is not None:
        # How rates scale over sockets was read off some of these very runs; the engine's share stands for it here.
        sources = {key: source for key, source in host.sources.items() if key.split(".")[0] != "numa"}
        host = host.model_copy(update={"numa": None, "sources": sources})
    name = "-".join(spec.name for spec in (card, host) if spec is not None)[:80]
    system = System(name=name, description="machine of a measured run", gpu=card, link=wire, cpu=host)
    stated: dict[str, float | str] = {}
    if devices > 1:
        stated |= {"gpu.devices": devices, "gpu.split": split or "tensor"}
    if host is not None:
        stated |= _of_host(host, sockets, numa, dram_gb_per_s)
    return system.with_values(stated, source="measured", citation="as the run states it") if stated else system


def _of_host(
    host: CpuSpec, sockets: int | None, numa: str | None, dram_gb_per_s: float | None
) -> dict[str, float | str]:
    """What a run states of its CPU: rates in proportion to the sockets it used, and the rate of its memory."""
    stated: dict[str, float | str] = {}
    share = 1.0
    if sockets is not None and sockets != host.sockets:
        share = sockets / host.sockets
        stated["cpu.sockets"] = sockets
    stated["cpu.dram_bandwidth_gb_per_s"] = (
        host.dram_bandwidth_gb_per_s * share if dram_gb_per_s is None else dram_gb_per_s
    )
    if share != 1.0:
        stated |= {f"cpu.peak_tflop_per_s.{key}": peak * share for key, peak in host.peak_tflop_per_s.items()}
    if numa == "one-socket":
        stated["cpu.numa"] = numa
    return stated
