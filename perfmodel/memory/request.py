"""What is asked of a memory report, checked."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from perfmodel.errors import ModelConfigError, PolicyError
from perfmodel.families import one_line
from perfmodel.hardware import System, load_system
from perfmodel.memory.activations import ACTIVATION_TOKENS, RESERVE_BYTES
from perfmodel.memory.parallel import Parallel
from perfmodel.model import MoEModel
from perfmodel.model.cache import MlaCache
from perfmodel.model.numbers import between, bits_of

if TYPE_CHECKING:
    from perfmodel.policies import Policy

#: Largest context, batch and number of tokens that are looked at.
MOST = 10**9
#: Bits of a cached number where neither the request nor the config says any [bit].
KV_BITS = 16.0


class Options(TypedDict, total=False):
    """What `memory_report` and the searches take.

    policy : policy text such as ``context-aware:gpu_experts=4``; None keeps everything on the GPU, or with
        ``gpu_experts`` the other experts behind the link.
    context : tokens of context of each sequence, 0 to 1e9 [token]; by default 4096.
    batch : sequences, over all GPUs, 1 to 1e9; by default 1.
    kv_bits : bits of a cached number [bit], above 0 and at most 64; by default what the config says, else 16.
    kv_layout : how sliding-window layers are allocated, a name of ``LAYOUTS``; by default ``capped``.
    mla_cache : ``compressed`` (default) or ``expanded``, see `MoEModel.kv_bytes`.
    gpu_experts : routed experts of every MoE layer that stay on the GPUs, all of them together, instead of what the
        policy says; layers with fewer keep all they have. By default None: the policy's, or all.
    replica_bits : widths of quantised copies of every expert behind the link [bit], instead of the policy's.
    parallel : how several GPUs divide the model; policies are for one GPU.
    kernel_supports : names of the formats that the engine computes on; weights in others are unpacked to bfloat16 at
        load (`Storage.upcast`). By default None: all.
    activation_tokens : tokens that run at once in a prefill, 1 to 1e9 [token]; by default 512, assumed.
    reserve_bytes : memory of a GPU that the driver, graphs and libraries take [byte]; by default ``RESERVE_BYTES``,
        assumed.
    """

    policy: str | None
    context: int
    batch: int
    kv_bits: float | None
    kv_layout: str
    mla_cache: MlaCache
    gpu_experts: int | None
    replica_bits: Sequence[float] | None
    parallel: Parallel
    kernel_supports: Iterable[str] | None
    activation_tokens: int | None
    reserve_bytes: float | None


class Request(NamedTuple):
    """Checked options, with their defaults. Errors as in `checked`."""

    model: MoEModel
    system: System
    policy: "Policy | None"
    context: int
    batch: int
    kv_bits: float
    kv_layout: str
    mla_cache: MlaCache
    gpu_experts: int | None
    replica_bits: tuple[float, ...] | None
    parallel: Parallel
    activation_tokens: int
    reserve_bytes: float
    notes: tuple[str, ...]


def whole(value: object, low: int, what: str, high: int = MOST) -> int:
    """The value as an integer from ``low`` to ``high``; ModelConfigError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelConfigError(f"memory: {what} is {one_line(value)}; allowed: an integer from {low} to {high}")
    return value


def _policy(text: object, system: System, parallel: Parallel) -> "Policy | None":
    if text is None:
        return None
    from perfmodel.policies import parse_policy
    from perfmodel.policies.base import need_ndp

    policy = parse_policy(text)  # type: ignore[arg-type]  # refuses what is no text
    if policy.needs_ndp:
        need_ndp(policy, system)
    if parallel.ranks > 1:
        raise PolicyError(
            f"policy {policy.name}: places experts around one GPU, and there are {parallel.ranks}; "
            "allowed: one GPU, or no policy"
        )
    return policy


def _widths(bits: object) -> tuple[float, ...] | None:
    if bits is None:
        return None
    if isinstance(bits, str) or not isinstance(bits, Sequence):
        raise ModelConfigError(f"memory: replica_bits is {one_line(bits)}; allowed: a sequence of bits such as (1, 2)")
    widths = tuple(bits_of(one, "memory: replica_bits") for one in bits)
    if len(set(widths)) < len(widths):
        raise ModelConfigError(f"memory: replica_bits is {one_line(bits)}; allowed: each width once")
    return widths


def _unpacked(model: MoEModel, supports: object) -> MoEModel:
    if supports is None:
        return model
    names = (supports,) if isinstance(supports, str) else supports
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(name, str) for name in names):
            return dataclasses.replace(model, storage=model.storage.upcast(names))
    raise ModelConfigError(f"memory: kernel_supports is {one_line(supports)}; allowed: names of formats")


def _named(model: object, system: object) -> tuple[MoEModel, System]:
    """Model and system, which may be given by name or path."""
    network = MoEModel.from_config(model) if isinstance(model, str | os.PathLike) else model
    machine = load_system(system) if isinstance(system, str | os.PathLike) else system
    for name, value, kind in (("model", network, MoEModel), ("system", machine, System)):
        if not isinstance(value, kind):
            raise ModelConfigError(
                f"memory: {name} is {one_line(value)}; allowed: a name, a path, or the object itself"
            )
    assert isinstance(network, MoEModel)
    assert isinstance(machine, System)
    return network, machine


def checked(given_model: object, given_system: object, options: Options) -> Request:
    """The request with its defaults; model and system may be given by name or path.

    Raises
    ------
    ModelConfigError : an option is not such a value. PolicyError : the policy is unknown, has a bad option, or cannot
        run on this system. PlacementError : the parallel degrees do not suit the model.
    """
    model, system = _named(given_model, given_system)
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        raise ModelConfigError(
            f"memory: found option {one_line(unknown[0])}; allowed: {', '.join(Options.__annotations__)}"
        )
    parallel = options.get("parallel", Parallel())
    if not isinstance(parallel, Parallel):
        raise ModelConfigError(f"memory: parallel is {one_line(parallel)}; allowed: a Parallel")
    policy = _policy(options.get("policy"), system, parallel)
    gpu_experts = options.get("gpu_experts")
    if gpu_experts is not None:
        most = max((kind.experts.count for kind in model.feed_forward if kind.experts is not None), default=0)
        gpu_experts = whole(gpu_experts, 0, "gpu_experts", most)
    tokens, reserve = options.get("activation_tokens"), options.get("reserve_bytes")
    kv_bits = model.kv_bits if options.get("kv_bits") is None else options.get("kv_bits")
    loaded = _unpacked(model, options.get("kernel_supports"))
    layout, mla_cache = options.get("kv_layout", "capped"), options.get("mla_cache", "compressed")
    model.kv_bytes(0, layout=layout, mla_cache=mla_cache)  # refuses unknown names
    notes = [f"{ACTIVATION_TOKENS} tokens of a prefill run at once"] * (tokens is None)
    notes += [f"{RESERVE_BYTES / 1e9:g} GB of a GPU go to the driver's context, graphs and libraries"] * (
        reserve is None
    )
    notes += [f"the cache holds numbers of {KV_BITS:g} bits"] * (kv_bits is None)
    mixes = [name for name, stored in loaded.storage.by_class().items() if "+" in stored.name]
    divided = parallel.pipeline > 1 or gpu_experts is not None or policy is not None
    if mixes and divided:
        notes.append(
            f"every layer is taken to store {' and '.join(mixes)} weights at the mean bits of all layers, though the "
            "checkpoint mixes formats: layers of more bits need more than this says"
        )
    if loaded.storage != model.storage:
        notes.append("formats that the engine has no kernels for are unpacked to bfloat16")
    return Request(
        model=loaded,
        system=system,
        policy=policy,
        context=whole(options.get("context", 4096), 0, "context"),
        batch=whole(options.get("batch", 1), 1, "batch"),
        kv_bits=KV_BITS if kv_bits is None else bits_of(kv_bits, "memory: kv_bits"),
        kv_layout=layout,
        mla_cache=mla_cache,
        gpu_experts=gpu_experts,
        replica_bits=_widths(options.get("replica_bits")),
        parallel=parallel,
        activation_tokens=ACTIVATION_TOKENS if tokens is None else whole(tokens, 1, "activation_tokens"),
        reserve_bytes=RESERVE_BYTES if reserve is None else between(reserve, 0, 1e15, "memory: reserve_bytes"),
        notes=tuple(notes),
    )
