"""A policy turns a recorded trace into a plan: who runs which expert, at how many bits, over which link.

Deciding stays apart from timing: nothing here knows how long anything takes.
"""

import dataclasses
import difflib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from perfmodel import placement
from perfmodel.bitwidth import LossTable
from perfmodel.errors import PlacementError, PolicyError
from perfmodel.hardware import System
from perfmodel.hardware.base import shown
from perfmodel.model import MoEModel
from perfmodel.placement import Behind, Side
from perfmodel.point import link_bytes_per_s, ndp_bytes_per_s
from perfmodel.routing import Replay, statistics

Overlap = Literal["max", "sum"]
PrefillMode = Literal["ndp", "fetch", "balanced"]
Rounding = Literal["nearest", "floor", "ceil"]
Fetch = Literal["before", "pipelined"]
RoundTrips = Literal["none", "cpu", "layer"]

#: Upper end of an option that counts experts: as many as a layer has.
EXPERTS = "E"
#: Most work classes of a plan, and most experts of a layer that are foretold: their numbers are kept as bytes.
MOST_CLASSES = MOST_FORETOLD = 255
#: Hardware keys that every plan reads: weights must fit, and the default placement is what fits.
CAPACITY_KEYS = (
    "gpu.memory_capacity_gb",
    "gpu.devices",
    "ndp.capacity_gb",
    "cpu.memory_capacity_gb",
    "cpu.sockets",
    "cpu.numa",
    "host.pinned_memory_gb",
)
#: Hardware keys that `split_count` reads.
SPLIT_KEYS = (
    "link.bandwidth_gb_per_s",
    "link.efficiency",
    "ndp.dram_bandwidth_gb_per_s",
    "ndp.dram_efficiency",
    "ndp.dram.",
    "ndp.mapping",
    "ndp.read_buffer",
)


class Executor(IntEnum):
    """Where one expert's work runs."""

    GPU = 0  #: resident in GPU memory
    FETCH = 1  #: copied over the link, then run on the GPU
    NDP = 2  #: in place on the near-data device
    SKIP = 3  #: not run at all
    CPU = 4  #: on the host, from its memory
    COPY = 5  #: copied over the link and not run: a wrong prefetch, an upload into a cache, a move between layers


class When(IntEnum):
    """When work is done, seen from the layer that it belongs to."""

    NOW = 0  #: the layer waits for it
    AHEAD = 1  #: a copy issued during the layer before, which hides what it can of it
    BEHIND = 2  #: the next layer hides what it can of it: a copy nobody waits for, or an expert deferred on the CPU


class WorkClass(NamedTuple):
    """What happens with one selected expert.

    bits : stored bits a weight [bit]; of several experts that are copied together, their sum.
    quantised : a replica below the model's stored precision, so group scales are read along with it.
    when : AHEAD only with FETCH and COPY, BEHIND only with COPY and CPU.
    """

    executor: Executor
    bits: float
    quantised: bool = False
    when: When = When.NOW


class ClassTable:
    """Collects the work classes of a plan and hands out their numbers, which fit into a byte."""

    def __init__(self) -> None:
        self._numbers: dict[WorkClass, int] = {}

    def number(self, work: WorkClass) -> int:
        """Number of a class; a new class gets the next one. Raises PolicyError for more than `MOST_CLASSES`."""
        if work not in self._numbers and len(self._numbers) == MOST_CLASSES:
            raise PolicyError(f"found more than {MOST_CLASSES} kinds of work in a plan, allowed {MOST_CLASSES}")
        return self._numbers.setdefault(work, len(self._numbers))

    def classes(self) -> tuple[WorkClass, ...]:
        """All classes in the order of their numbers."""
        return tuple(self._numbers)


@dataclass(frozen=True)
class Plan:
    """Every decision of one policy on one trace, before any time is known.

    policy : the policy with all its options spelled out.
    classes : the work classes that ``picks`` and ``prefill_class`` refer to by number.
    picks : uint8 [decode tokens, layers, k], the class of every selected expert; sequences one after another, and the
        tokens of a decode step within each.
    copies : uint8 [decode tokens, layers, W], classes of copies that no pick of the layer runs, and of experts that the
        CPU computes in vain, filled up with a class that is skipped; None without any.
    offsets : int64 [sequences + 1], where each sequence's decode tokens start.
    context_start : int64 [sequences], tokens of context before the first decode step; of sequences in a batch their
        mean, float64.
    prompt_tokens : int64 [sequences], tokens of the priced prefill (0 without one).
    overlap : how the GPU side of a layer combines with the near-data side and the CPU while decoding.
    fetch : copies on demand all come before the layer computes, or every expert computes as soon as it is there: first
        the residents, then the copied ones in the order of their classes, most tokens first.
    round_trips : in which layers the host takes part in a decode step: none, those with CPU work, or all MoE layers.
    attention_on, trunk_on : where attention and its KV cache are, and where router, dense layers, shared experts and
        LM head are.
    prefill_class, prefill_tokens : [sequences, layers, experts], class and token count of every expert in the
        prefill, or None when the trace holds no prefill.
    migrated_experts : float64 [sequences], experts copied to the GPU once, between prefill and decode.
    gpu_experts : experts of every layer resident on the GPU (what the memory check counts).
    gpu_buffer_bytes : caches and staging buffers on the GPU [byte].
    replica_bits : widths of the quantised copies kept beside the full-precision experts [bit].
    hot : bool [sequences, layers, experts], the placement, where the policy has one; ``alpha`` and ``norm`` are the
        importance it was chosen by.
    mean_bits : mean width of the experts that the policy quantised, unused ones included [bit]; None where it quantises
        none, or gives widths to picks.
    sequence_bits : float64 [sequences], the same of every sequence on its own; NaN or None as there.
    notes : sentences for the report: what was assumed or chosen by default.
    behind : what is kept behind the link, see `placement.memory_footprint`.
    pinned_experts : experts of every layer that are pinned in host memory if anything is copied, because they may be
        copied; None: all of them.
    """

    policy: str
    classes: tuple[WorkClass, ...]
    picks: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    context_start: NDArray[Any]
    prompt_tokens: NDArray[np.int64]
    overlap: Overlap
    prefill_class: NDArray[np.uint8] | None
    prefill_tokens: NDArray[np.int64] | None
    migrated_experts: NDArray[np.float64]
    gpu_experts: float
    gpu_buffer_bytes: float
    replica_bits: tuple[float, ...]
    notes: tuple[str, ...]
    copies: NDArray[np.uint8] | None = None
    fetch: Fetch = "before"
    round_trips: RoundTrips = "none"
    attention_on: Side = "gpu"
    trunk_on: Side = "gpu"
    hot: NDArray[np.bool_] | None = None
    alpha: float | None = None
    norm: placement.Norm = "sum"
    mean_bits: float | None = None
    sequence_bits: NDArray[np.float64] | None = None
    behind: Behind = "experts"
    pinned_experts: float | None = None


class Residency(NamedTuple):
    """What a policy keeps in memory whatever the trace: the same fields as in `Plan`.

    gpu_experts : experts of every layer resident on the GPU. gpu_buffer_bytes : its caches and staging buffers [byte].
    replica_bits : widths of the quantised copies kept beside the full-precision experts [bit].
    attention_on, trunk_on : where the rest of the network is.
    behind : what is kept behind the link: all experts and those copies, the copies alone, or nothing.
    """

    gpu_experts: float
    gpu_buffer_bytes: float
    replica_bits: tuple[float, ...]
    attention_on: Side = "gpu"
    trunk_on: Side = "gpu"
    behind: Behind = "experts"


class PlanInputs(NamedTuple):
    """What a policy may look at. ``system`` serves capacity checks and hardware-dependent rules only."""

    model: MoEModel
    system: System
    replay: Replay
    losses: LossTable | None

    @property
    def max_context(self) -> int:
        """Longest context that any sequence reaches [tokens]."""
        return self.replay.max_context

    @property
    def most_gpu_experts(self) -> float:
        """Experts per layer that the GPU has room for, see `placement.gpu_room`."""
        return placement.gpu_room(
            self.model,
            self.system.gpu.memory_capacity_bytes,
            self.max_context,
            sequences=self.replay.batch.sequences,
        )


class OptionInfo(NamedTuple):
    """One option of a policy, for tables and help."""

    name: str
    default: Any
    allowed: str
    meaning: str


def option(
    default: Any, meaning: str, allowed: str = "", *, low: float | None = None, high: float | str | None = None
) -> Any:
    """Dataclass field of a policy option.

    meaning : in a few words. allowed : the values in words, where their type and the limits do not say it.
    low, high : smallest and largest number; `EXPERTS` stands for the number of experts of a layer. Other options may
    narrow them further, which is for the policy to check.
    """
    metadata = {"meaning": meaning, "allowed": allowed, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies: a frozen dataclass whose fields are the options."""

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    needs_ndp: ClassVar[bool] = True
    needs_cpu: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or beyond their limits; a policy adds what its options say together."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                value = value.item()
                object.__setattr__(self, field.name, value)
            self.check_option(field, value)

    @classmethod
    def check_option(cls, field: "dataclasses.Field[Any]", value: Any) -> None:
        """Refuse a value of one option, whatever the other options are.

        Raises
        ------
        PolicyError : the wrong type, or a number beyond the limits of the option.
        """
        low, high = field.metadata["low"], field.metadata["high"]
        fits = _fits(value, field.type)
        number = fits and isinstance(value, int | float)
        if not fits or (
            number and ((low is not None and value < low) or (isinstance(high, int | float) and value > high))
        ):
            raise PolicyError(
                f"policy {cls.name}: option {field.name}: found {shown(value)}, allowed {_allowed(field)}"
            )

    @abstractmethod
    def plan(self, inputs: PlanInputs) -> Plan:
        """Decide everything for one trace. Raises PolicyError, PlacementError or TraceError."""

    @abstractmethod
    def residency(self, model: MoEModel, most_gpu_experts: float, losses: LossTable | None = None) -> Residency:
        """What the policy keeps in memory; its plans keep this or less.

        Parameters
        ----------
        most_gpu_experts : experts per layer that the GPU has room for at the stored precision, a part included, -1 if
            not even for none; policies that choose a count keep below it.
        losses : loss table of the quantised copies; None for the bundled or assumed one.

        Raises
        ------
        PolicyError : an option does not suit the model. TraceError : nor does the loss table.
        """

    def at_capacity(self, model: MoEModel, most_gpu_experts: float) -> "Policy":
        """This policy with the GPU memory filled, where its own defaults leave some empty; for equal comparisons.

        most_gpu_experts : as in `residency`.
        """
        return self

    @property
    def plan_keys(self) -> tuple[str, ...]:
        """Hardware keys whose value can change the plan or refuse it; a key that ends in ``.`` stands for all below.

        Capacities are always among them, because a plan is checked against them. No other key of a system matters
        to `plan`, so a plan may be priced with any other value there.
        """
        return CAPACITY_KEYS

    @property
    def spec(self) -> str:
        """The policy with every option, in the form the command line reads."""
        values = ",".join(f"{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{self.name}:{values}" if values else self.name

    @classmethod
    def options(cls) -> tuple[OptionInfo, ...]:
        """Every option with default, allowed values and meaning."""
        return tuple(OptionInfo(f.name, f.default, _allowed(f), f.metadata["meaning"]) for f in dataclasses.fields(cls))


def _text(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value)


def _limit(end: float) -> str:
    return str(int(end)) if float(end).is_integer() and abs(end) < 1e15 else f"{end:g}"


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _fits(value: Any, kind: Any) -> bool:
    """Whether an option's value has its declared type: a choice, a finite number, a whole number, a text."""
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    choices = _choices(kind)
    if choices:
        return value in choices
    if isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and abs(value) < math.inf
    return isinstance(value, kind)


def _allowed(field: "dataclasses.Field[Any]") -> str:
    choices = _choices(field.type)
    if choices or field.metadata["allowed"]:
        return " | ".join(map(str, choices)) if choices else str(field.metadata["allowed"])
    ends = (field.metadata["low"], field.metadata["high"])
    low, high = (_limit(end) if isinstance(end, int | float) else end for end in ends)
    words = (
        f"{low} to {high}" if low and high else f"{low} or more" if low else f"at most {high}" if high else "a value"
    )
    return f"{words} | auto" if isinstance(field.type, UnionType) and type(None) in get_args(field.type) else words


def _convert(policy: str, field: "dataclasses.Field[Any]", text: str) -> Any:
    """Value of an option from its text, by the field's type; the range is checked by the policy itself."""
    kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
    if type(None) in kinds and text in ("auto", "none"):
        return None
    choices = _choices(field.type)
    if choices:
        if text in choices:
            return text
    else:
        for kind in (k for k in kinds if k is not type(None)):
            try:
                value = kind(text if kind is str or "_" not in text else "")  # no digit groups such as 1_0
            except ValueError:
                continue
            if not isinstance(value, float) or math.isfinite(value):
                return value
    raise PolicyError(f"policy {policy}: option {field.name}: found {shown(text)}, allowed {_allowed(field)}")


def parse_options(kind: type[Policy], text: str) -> Policy:
    """Policy of the given kind from ``key=value,key=value``.

    Raises
    ------
    PolicyError : unknown or repeated option, or a value of the wrong type or range.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise PolicyError(f"policy {kind.name}: found {shown(item)}, allowed key=value pairs joined by commas")
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise PolicyError(
                f"policy {kind.name}: unknown option {shown(key)}, allowed {', '.join(fields) or 'none'}{hint}"
            )
        if key in values:
            raise PolicyError(f"policy {kind.name}: option {key} is given twice")
        values[key] = _convert(kind.name, fields[key], value)
    return kind(**values)


def require(policy: Policy, option_name: str, ok: bool, allowed: str) -> None:
    """Refuse an option value outside its range."""
    if not ok:
        found = _text(getattr(policy, option_name))
        raise PolicyError(f"policy {policy.name}: option {option_name}: found {found}, allowed {allowed}")


def require_experts(policy: Policy, model: MoEModel, *options: str) -> None:
    """Refuse options that count experts of a layer, where a layer of the model has fewer; None counts nothing."""
    for name in options:
        count = getattr(policy, name)
        require(policy, name, count is None or count <= model.num_experts, f"0 to {model.num_experts} for {model.name}")


def need_ndp(policy: Policy, system: System) -> None:
    """Refuse a system without a near-data device."""
    if system.ndp is None:
        raise PolicyError(
            f"policy {policy.name} runs experts on a near-data device, and system {system.name} has none; "
            "choose a system with an ndp part (perfmodel specs list) or a policy that needs none (perfmodel policies)"
        )


def prefill_counts(inputs: PlanInputs) -> NDArray[np.int64] | None:
    """Tokens per expert of every sequence's prefill [S, L, E], or None when the trace holds no prefill."""
    trace = inputs.replay.trace
    return statistics.selection_counts(trace, "prefill") if trace.has_prefill else None


def split_count(count: NDArray[np.int64], system: System, rounding: Rounding) -> NDArray[np.int64]:
    r"""How many of ``count`` experts go to the GPU so that both sides finish together.

    .. math:: H = n\,\frac{B_\mathrm{link}}{B_\mathrm{link} + B_\mathrm{NDP}}

    the point where copying H experts takes as long as reading the other n - H in place, both at the effective
    rates of the system. Source: MoNDE, arXiv 2405.18832; the rounding is not published, so it is an option.
    """
    link, near = link_bytes_per_s(system), ndp_bytes_per_s(system)
    share = count * (link / (link + near))
    rounded = {"nearest": np.rint, "floor": np.floor, "ceil": np.ceil}[rounding](share)
    return np.asarray(rounded, dtype=np.int64)


def plan_prefill(
    inputs: PlanInputs, mode: PrefillMode, table: ClassTable, hot: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.uint8] | None, NDArray[np.int64] | None]:
    """Class and token count of every expert in the prefill, at the stored precision.

    ``ndp`` runs experts where they live: on the near-data device, or on the GPU for those in ``hot`` (a placement
    known before the prompt). ``fetch`` copies every selected expert to the GPU. ``balanced`` copies the experts
    with most tokens and leaves the rest (see split_count; ties go to the lower expert id).
    """
    tokens = prefill_counts(inputs)
    if tokens is None:
        return None, None
    bits = float(inputs.model.expert_bits)
    here = np.zeros(tokens.shape, np.bool_) if hot is None else hot
    fetch = np.zeros(tokens.shape, np.bool_)
    if mode == "fetch":
        fetch = ~here
    elif mode == "balanced":
        cold = np.where(here, 0, tokens)
        order = np.argsort(-cold, axis=-1, kind="stable")
        rank = np.argsort(order, axis=-1, kind="stable")
        fetch = rank < split_count((cold > 0).sum(axis=-1, keepdims=True), inputs.system, "nearest")
    classes = np.full(tokens.shape, table.number(WorkClass(Executor.NDP, bits)) if mode != "fetch" else 0, np.uint8)
    if fetch.any():
        classes[fetch] = table.number(WorkClass(Executor.FETCH, bits))
    if here.any():
        classes[here] = table.number(WorkClass(Executor.GPU, bits))
    return classes, tokens


def make_plan(
    policy: Policy,
    inputs: PlanInputs,
    classes: ClassTable,
    picks: NDArray[np.uint8],
    prefill: tuple[NDArray[np.uint8] | None, NDArray[np.int64] | None],
    **decisions: Any,
) -> Plan:
    """A plan from what a policy decided, with what follows from the trace; refused when its weights do not fit.

    prefill : what plan_prefill returned. decisions : the other fields of Plan that differ from policy to policy.

    Raises
    ------
    PlacementError : weights that do not fit the GPU, or the device or host memory behind the link.
    """
    trace = inputs.replay.trace
    plan = Plan(
        policy=policy.spec,
        classes=classes.classes(),
        picks=picks,
        offsets=inputs.replay.decode_offsets,
        context_start=inputs.replay.context_start,
        prompt_tokens=trace.prompt_len,
        prefill_class=prefill[0],
        prefill_tokens=prefill[1],
        **{"migrated_experts": np.zeros(trace.num_sequences), **decisions},
    )
    notes = [*plan.notes, *_check_memory(inputs, plan)]
    if plan.round_trips != "none" and inputs.system.host is None and inputs.system.ndp is None:
        notes.append("the system has no host part: round trips and copies of the host cost nothing")
    return dataclasses.replace(plan, notes=tuple(notes))


def footprints(inputs: PlanInputs, plan: Plan) -> tuple[placement.Footprint, placement.Footprint]:
    """What a plan keeps on the GPU, and what is kept behind the link."""
    on: dict[str, Any] = {
        "attention_on": plan.attention_on,
        "trunk_on": plan.trunk_on,
        "sequences": inputs.replay.batch.sequences,
    }
    model, context, cpu = inputs.model, inputs.max_context, inputs.system.cpu
    gpu = placement.gpu_footprint(model, plan.gpu_experts, context, buffer_bytes=plan.gpu_buffer_bytes, **on)
    on |= {"behind": plan.behind, "copies": 1 if cpu is None or inputs.system.ndp is not None else cpu.expert_copies}
    return gpu, placement.memory_footprint(model, plan.replica_bits, context_tokens=context, **on)


def _check_memory(inputs: PlanInputs, plan: Plan) -> tuple[str, ...]:
    """Refuse a plan whose weights do not fit the GPU or what is behind the link; notes say what was not checked."""
    model, system = inputs.model, inputs.system
    capacity = system.gpu.memory_capacity_bytes
    use, behind = footprints(inputs, plan)
    if use.total > capacity:
        most = placement.largest_gpu_experts(
            model,
            capacity - plan.gpu_buffer_bytes,
            inputs.max_context,
            attention_on=plan.attention_on,
            trunk_on=plan.trunk_on,
            sequences=inputs.replay.batch.sequences,
        )
        advice = f"at most {most} experts a layer fit" if most >= 0 else "not even zero experts a layer fit"
        size = inputs.replay.batch.sequences
        each = f" of each of {size} sequences" if size > 1 else ""
        count = f"{plan.gpu_experts:g} experts a layer at {inputs.max_context} tokens{each}"
        placement.check_fits(f"{model.name} with {count} on {system.gpu.name}", use, capacity, advice)
    if system.ndp is not None:
        advice = "use a device with more capacity or fewer replicas"
        placement.check_fits(f"{model.name} on {system.ndp.name}", behind, system.ndp.capacity_bytes, advice)
        return ()
    _check_pinned(inputs, plan)
    host = None if system.cpu is None else system.cpu.memory_capacity_bytes
    if system.cpu is not None and host is not None:
        advice = "use a host with more memory or a model with smaller experts"
        placement.check_fits(f"{model.name} in the memory of {system.cpu.name}", behind, host, advice)
        return ()
    where = f"by cpu {system.cpu.name}" if system.cpu is not None else f"by system {system.name}, which has no cpu"
    return (
        f"host memory is not stated {where}, so it is not checked against the {behind.total / 1e9:.4g} GB of experts",
    )


def _check_pinned(inputs: PlanInputs, plan: Plan) -> None:
    """Refuse copies from more host memory than may be pinned: the experts that may be copied, at every width copied."""
    model, host = inputs.model, inputs.system.host
    most = None if host is None else host.pinned_memory_bytes
    copies = [work for work in plan.classes if work.executor in (Executor.FETCH, Executor.COPY)]
    if host is None or most is None or not (copies or plan.migrated_experts.any()):
        return
    # What is copied ahead and not run may be a part of an expert or several of them, at a width that others have too.
    widths = {work.bits for work in copies if work.executor == Executor.FETCH or work.when == When.BEHIND}
    if plan.migrated_experts.any() or not widths:
        widths |= set(plan.replica_bits if plan.behind == "replicas" else (float(model.expert_bits),))
    each = model.num_experts if plan.pinned_experts is None else plan.pinned_experts
    needed = each * len(model.moe_layers) * sum(model.expert_bytes(bits) for bits in widths)
    if needed > most:
        raise PlacementError(
            f"{plan.policy} copies experts of {model.name} from {needed / 1e9:.2f} GB of host memory that has to be"
            f" pinned, host {host.name} allows {most / 1e9:.2f} GB (host.pinned_memory_gb); pin more, or use a policy"
            " that copies no experts, such as llama-cpp:op_offload=off"
        )
