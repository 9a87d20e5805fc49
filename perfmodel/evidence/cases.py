"""Questions that the validation answers one by one, beside its statistics.

Two machines that are documented completely, a batch sweep of one engine, a question that several tools were asked, what
different people measured on one machine, and the kinds of run that the model is known to get wrong. Every number comes
from the measured rows, or from tools as their figures were published.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.evidence.constants import SHARED, STREAMED
from perfmodel.evidence.described import model_of, profile_of
from perfmodel.evidence.errors import Errors, errors
from perfmodel.evidence.measured import MeasuredRun
from perfmodel.evidence.occupancy import LRU_HITS, distinct_experts, missed_per_token, uploads_per_token
from perfmodel.evidence.predict import Predicted, predicted
from perfmodel.evidence.validation import Row
from perfmodel.hardware import EngineSpec, load_spec

#: Engines that run on one machine each, whose constants are that machine's own benchmarks.
FETCHING, CACHING = "gpu-offloading", "llama-cpp-expert-cache"
DOCUMENTED = "documented machine"
#: Tokens of a prompt from which the caching engine streams experts instead of running them on the CPU.
SWITCH_TOKENS, PASS_TOKENS = 32, 512


def kernel_bytes(run: MeasuredRun) -> float:
    """Bytes that one grouped kernel of a decode step reads: one matrix of every expert that a layer visits [byte]."""
    model = model_of(run)
    batch = run.batch or 1.0
    distinct = run.distinct_experts or distinct_experts(model, batch, run.batch_of == "text")
    return distinct * model.expert_bytes() / len(model.expert_matrices)


def engine_class(run: MeasuredRun) -> str:
    """The engine of a run in a word: graph engine, eager engine, or documented machine, to which nothing is fitted."""
    profile = profile_of(run)
    if profile in STREAMED:
        return "eager engine"
    return "graph engine" if profile in SHARED else DOCUMENTED


class Cell(NamedTuple):
    """Some rows of a machine by what they have in common.

    bias : median of predicted over measured, less 1. median, worst : of |predicted / measured - 1|.
    """

    label: tuple[str, ...]
    rows: int
    bias: float
    median: float
    worst: float


def _cell(label: tuple[str, ...], ratios: Sequence[float]) -> Cell:
    found = np.array(ratios)
    off = np.abs(found - 1.0)
    return Cell(label, len(found), float(np.median(found)) - 1.0, float(np.median(off)), float(off.max()))


class Fetched(NamedTuple):
    """The machine that fetches experts.

    cells : milliseconds a step by policy and prefetch. rankings, right : orders of the policies at a cache size and
    prefetch, and how many of them the prediction has right. near : orders that are right but for policies within 2 %.
    """

    cells: tuple[Cell, ...]
    rankings: int
    right: int
    near: int


def fetched_machine(rows: Sequence[Row]) -> Fetched:
    """Errors of the rows of the fetching machine by policy and prefetch, and whether policies are ranked right."""
    own = [row for row in rows if row.run.engine == FETCHING and row.quantity == "decode"]
    kinds = sorted({(str(row.run.prefetch), str(row.run.policy)) for row in own})
    cells = tuple(
        _cell(
            (policy, prefetch),
            [1.0 / row.ratio for row in own if (str(row.run.prefetch), str(row.run.policy)) == (prefetch, policy)],
        )
        for prefetch, policy in kinds
    )
    right = near = 0
    places = sorted({(row.run.gpu_experts or 0.0, str(row.run.prefetch)) for row in own})
    for place in places:
        here = [row for row in own if (row.run.gpu_experts or 0.0, str(row.run.prefetch)) == place]
        measured = sorted(here, key=lambda row: row.measured)
        right += [row.run.id for row in measured] == [row.run.id for row in sorted(here, key=lambda row: row.held_out)]
        pairs = [(a, b) for i, a in enumerate(measured) for b in measured[i + 1 :]]
        near += all(a.held_out < b.held_out or b.measured < 1.02 * a.measured for a, b in pairs)
    return Fetched(cells, len(places), right, near)


#: What the owner of the caching machine fitted to 20 runs of it: milliseconds of a token without a miss, and of each
#: missed and each uploaded expert (everett6/moe-prefetch, cost model of its second version, rms 0.06 ms).
OWNERS_MS = np.array([6.789, 0.0386, 0.0256])


class CostLine(NamedTuple):
    """A number of slots: experts that a token misses, and milliseconds a token by the owner's regression and ours."""

    slots: int
    missed: float
    owners_ms: float
    predicted_ms: float


def _apart(run: MeasuredRun) -> bool:
    """Whether a run of the caching machine is no mean over all prompts, or of one round of them only."""
    return run.prompt_tokens is None or run.confidence != "high"


def cached_machine(rows: Sequence[Row]) -> tuple[Cell, ...]:
    """Milliseconds a token of the caching machine by slots of a layer: means over its 23 prompts, and other runs.

    The other runs are single prompts, scans of a setting, and builds with another overlap.
    """
    own = [row for row in rows if row.run.engine == CACHING and row.quantity == "decode"]
    kinds = sorted({(row.run.slots_per_layer or 0.0, _apart(row.run)) for row in own})
    return tuple(
        _cell(
            (f"{slots:g}", "other runs" if other else "means over 23 prompts"),
            [1.0 / row.ratio for row in own if (row.run.slots_per_layer or 0.0, _apart(row.run)) == (slots, other)],
        )
        for slots, other in kinds
    )


def cost_line(rows: Sequence[Row]) -> tuple[CostLine, ...]:
    """Milliseconds a token of the caching machine at other numbers of slots, against the regression of its owner."""
    own = [row.run for row in rows if row.run.engine == CACHING and row.quantity == "decode"]
    runs = [run for run in own if not _apart(run) and run.copies != "pageable"]
    if not runs:
        return ()
    found = []
    for slots in LRU_HITS:
        run = replace(runs[0], slots_per_layer=float(slots), misses_per_token=None, uploads_per_token=None)
        model = model_of(run)
        missed, uploads = missed_per_token(run, model), uploads_per_token(run, model)
        (one,) = predicted([run], "decode")
        found.append(CostLine(slots, missed, float(OWNERS_MS @ (1.0, missed, uploads)), 1e3 / one.rate()))
    return tuple(found)


class Pass(NamedTuple):
    """Time of a prefill on the caching machine: measured and predicted [s], and what it is of."""

    run: str
    what: str
    rows: int
    measured_s: float
    predicted_s: float


def cached_prefill(rows: Sequence[Row]) -> tuple[Pass, ...]:
    """Prefills of the caching machine: whole prompts below its switch, and passes of 512 tokens of long ones."""
    own = [row for row in rows if row.run.engine == CACHING and row.quantity == "prefill"]
    found = []
    for copies in sorted({row.run.copies or "pinned" for row in own}):
        here = [row for row in own if (row.run.copies or "pinned") == copies]
        for what, low, high in (
            (f"prompts below {SWITCH_TOKENS} tokens, experts on the CPU", 1, SWITCH_TOKENS - 1),
            (f"prompts of {SWITCH_TOKENS} to {PASS_TOKENS - 1} tokens, streamed", SWITCH_TOKENS, PASS_TOKENS - 1),
            (f"a pass of {PASS_TOKENS} tokens of longer prompts, streamed", PASS_TOKENS, 10**9),
        ):
            some = [row for row in here if row.run.prompt_tokens and low <= row.run.prompt_tokens <= high]
            if not some:
                continue
            parts = [-(-(row.run.prompt_tokens or 1) // PASS_TOKENS) if low == PASS_TOKENS else 1 for row in some]
            times = [
                [(row.run.prompt_tokens or 1) / rate / part for row, part, rate in zip(some, parts, rates, strict=True)]
                for rates in ([row.measured for row in some], [row.held_out for row in some])
            ]
            found.append(Pass(f"{copies} weights", what, len(some), float(np.mean(times[0])), float(np.mean(times[1]))))
    return tuple(found)


class SweepRow(NamedTuple):
    """A batch of a sweep: tokens per second measured, by the engine's own profile (in sample), and held out [token/s].

    own : by the profile that was fitted to this sweep. held_out : by the shared constants without the sweep's source.
    """

    batch: float
    measured: float
    own: float
    held_out: float


def batch_sweep(rows: Sequence[Row], profile: str = "llama-cpp-cuda-2025") -> tuple[SweepRow, ...]:
    """The batch sweep of an engine that has a profile of its own, with the step from one kernel path to the other."""
    engine = load_spec(profile)
    if not isinstance(engine, EngineSpec):
        raise SpecError(f"{profile}: not an engine")
    own = [row for row in rows if row.run.engine == profile and row.quantity == "decode"]
    found = []
    for row, ready in zip(own, predicted([row.run for row in own], "decode"), strict=True):
        rate = ready._replace(system=ready.system.with_engine(engine)).rate()
        found.append(SweepRow(row.run.batch or 1.0, row.measured, rate, row.held_out))
    return tuple(sorted(found))


class Answer(NamedTuple):
    """What a tool says of one question: milliseconds of a step by batch, None where it gives no answer."""

    tool: str
    steps_ms: tuple[float | None, ...]
    why: str


#: Mixtral-8x7B in BF16 on two H100 SXM, context 1024: milliseconds of a decode step at these batches.
BATCHES = (1, 4, 16, 64)
#: The tools' own answers to it. None of them was compared with a GPU; the first rests on tables of measured kernels.
TOOLS = (
    Answer("aiconfigurator SILICON, vLLM", (6.26, 11.83, 17.65, 24.11), "tables of measured kernels"),
    Answer("BLIS roofline", (2.66, 6.62, 9.61, 10.66), "counts two matrices of an expert, by choice"),
    Answer("GenZ", (4.24, 4.31, 4.55, 5.55), "the top-k experts of one token at any batch"),
    Answer("llm-analysis", (14.50, 14.63, 15.15, 17.22), "all experts always"),
    Answer("InferSim (H800)", (None, None, 22.98, 25.13), "all experts, and 5 ms"),
    Answer("ridgepoint", (6.35, None, None, None), "best of an interval"),
)


class Question(NamedTuple):
    """Milliseconds of a step by batch: the bandwidth floor, the ideal engine and the vLLM profile."""

    floor_ms: tuple[float, ...]
    ideal_ms: tuple[float, ...]
    vllm_ms: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """The vLLM profile over the measured-table tool, less 1 [1]."""
        known = (float(one or 1.0) for one in TOOLS[0].steps_ms)
        return tuple(own / other - 1.0 for own, other in zip(self.vllm_ms, known, strict=True))


def mixtral_question(values: Mapping[str, float] | None = None) -> Question:
    """The question above, with experts visited uniformly, as the tools take them to be.

    values : constants of the vLLM profile by key that take the place of its own.
    """
    runs = [
        MeasuredRun(
            id=f"batch {batch}", source="a question", citation="no row of evidence", confidence="low",
            model="mixtral-8x7b", expert_bits=16.0, other_bits=16.0, gpu="h100-sxm", devices=2, split="tensor",
            engine="vllm", batch=float(batch), context_tokens=1024.0, gpu_experts=1.0, decode_tok_per_s=1.0,
            distinct_experts=8.0 * (1.0 - 0.75**batch),
        )
        for batch in BATCHES
    ]  # fmt: skip
    vllm = predicted(runs, "decode")
    if values:
        changed = {f"engine.{key}": value for key, value in values.items()}
        cite = "another value of a constant, to see what follows"
        vllm = tuple(
            row._replace(system=row.system.with_values(changed, source="assumed", citation=cite)) for row in vllm
        )
    ideal = predicted([replace(run, engine="ideal") for run in runs], "decode")
    floors = []
    for run, ready in zip(runs, vllm, strict=True):
        model, gpu = model_of(run), ready.system.gpu
        batch, distinct = run.batch or 1.0, run.distinct_experts or 0.0
        read: float = model.non_expert_bytes - model.embedding_params * 2.0  # a step looks up rows of the embedding
        read += model.num_moe_layers * distinct * model.expert_bytes() + batch * model.kv_read_bytes(1024.0)
        floors.append(1e3 * read / (2.0 * gpu.memory_bandwidth_gb_per_s * 1e9))

    def steps(rows: Sequence[Predicted]) -> tuple[float, ...]:
        return tuple(1e3 * (run.batch or 1.0) / row.rate() for run, row in zip(runs, rows, strict=True))

    return Question(tuple(floors), steps(ideal), steps(vllm))


def spread(rows: Sequence[Row], model: str, gpu: str) -> list[Row]:
    """Batch-1 decode rows of one model that one GPU held whole, the slowest first."""
    found = [
        row
        for row in rows
        if row.quantity == "decode"
        and (row.run.model, row.run.gpu, row.run.devices, row.run.batch) == (model, gpu, 1, 1)
        and row.run.gpu_experts == 1.0
    ]
    return sorted(found, key=lambda row: row.measured)


class Failure(NamedTuple):
    """A kind of run that the model gets wrong.

    errors : of fits without each row's source.
    """

    kind: str
    quantity: str
    why: str
    errors: Errors


def _recurrent(run: MeasuredRun) -> bool:
    return any(kind.recurrent_elements for kind in model_of(run).attention)


#: Kinds of run that were seen to be off, by what a row says of itself, and why.
_FAILURES: tuple[tuple[str, str, Callable[[MeasuredRun], bool], str], ...] = (
    ("a server on the day a model came out", "decode",
     lambda run: "day-1" in (run.engine_version or ""),
     "kernels for the model's number format were not there yet; the profile is that of a tuned server"),
    ("engines tuned for one card", "decode",
     lambda run: run.engine in ("imp", "sparkinfer") and not _recurrent(run),
     "their kernels reach more of the memory than those of llama.cpp, whose profile they are predicted with"),
    ("eager Python frameworks", "decode",
     lambda run: profile_of(run) in STREAMED,
     "launches are counted for one framework and one model, and waiting for the host is not"),
    ("several GPUs in a row", "decode",
     lambda run: run.split == "layer",
     "hand-overs are free in the model, which shows with many GPUs; with two small ones it is too slow"),
    ("batches over several GPUs", "decode",
     lambda run: run.split == "tensor" and (run.batch or 1.0) > 1.0,
     "time that a server spends on scheduling, and experts that are split unevenly, are not in the model"),
    ("hybrid recurrent models", "prefill",
     _recurrent,
     "the scan of recurrent layers over a prompt is priced as a product of matrices"),
    ("prefill on consumer GPUs with everything resident", "prefill",
     lambda run: run.gpu_experts == 1.0 and run.devices == 1,
     "one share of the arithmetic peak for all; tensor cores of one generation are used better than those of another"),
    ("prefill on CPUs with matrix units", "prefill",
     lambda run: run.engine == "ktransformers-amx",
     "long prompts lose speed that the attention of the model does not explain"),
    ("prompts of a few tokens on the CPU", "prefill",
     lambda run: run.engine == CACHING and (run.prompt_tokens or SWITCH_TOKENS) < SWITCH_TOKENS,
     "the time of the first tokens is not in the benchmarks of the machine"),
    ("copies one layer ahead", "decode",
     lambda run: run.prefetch == "oracle-1",
     "copies are taken to hide behind the whole layer before, and a part of them waited"),
)  # fmt: skip


def known_failures(rows: Sequence[Row]) -> tuple[Failure, ...]:
    """The kinds of run above with their errors now, those that no row is of left out."""
    found = []
    for kind, quantity, of, why in _FAILURES:
        some = [row for row in rows if row.quantity == quantity and of(row.run)]
        if some:
            one = errors(np.log([row.ratio for row in some]), [row.run.source for row in some])
            found.append(Failure(kind, quantity, why, one))
    return tuple(found)
