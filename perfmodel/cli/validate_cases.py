"""Simulators, published figures, documented machines, other tools, and where the model fails, as a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.cli.pages import Grid, Part
from perfmodel.cli.validate_measured import cells, share, short

if TYPE_CHECKING:
    from perfmodel.evidence.cases import Cell
    from perfmodel.evidence.reproduce import Reproduction
    from perfmodel.evidence.simulators import Comparison
    from perfmodel.evidence.validation import Row, Validation

#: What tools of the kind say about their own errors: the tool, what it was compared with, and the figures it gives.
PEERS = (
    ("LLMServingSim (docs/validation.md)", "vLLM 0.19, 300 requests, 4 set-ups",
     "TPOT -1.7 to +0.8 %, MoE TTFT -13.6 %; TPOT +12.9 % at its default memory share on a full card"),
    ("InferSim (README)", "profiles of DeepSeek, SGLang",
     "decode +15 % (DeepSeek-V3), -4 % (Qwen3-30B-A3B), -4 % (Qwen3-8B)"),
    ("BLIS (issue 436, PR 944)", "vLLM, 13 then 38 runs",
     "TPOT by its roofline 48, later 36 %; best model 11.8 % end to end, 22.8 % TTFT"),
    ("Vidur (paper)", "a fork of vLLM", "latency within 9 %, dense models only"),
    ("aiconfigurator (arXiv 2601.06288)", "its own paper",
     "users report more: 4.6x (issue 1396), 1.5 to 3x (issue 1150), TTFT 45 % on A100 (issue 1205)"),
    ("ridgepoint", "vLLM 0.28, A100 and H100", "memory about 1 %; speed as an interval with a flag"),
    ("kekzl/imp (PR 2061)", "its own counter", "replayed hit rate 62.0 %, measured 62.7 %"),
    ("moe-fit", "one model on one machine", "first version 20x too fast, which it says"),
    ("TerraceMoE", "its own collectives", "4.1 % at the median of calls; whole steps failed, which it says"),
    ("StrataMoE", "nothing physical", "which it says"),
    ("GenZ, llm-analysis, LLM-Viewer, DynaNDE", "none found in their repositories", "-"),
)  # fmt: skip


def simulator_parts(scalesim: tuple[Comparison, ...], ramulator: tuple[Comparison, ...]) -> list[Part]:
    """Closed forms beside two simulators."""
    from perfmodel.evidence.simulators import STREAMS

    lines = []
    for name, rows in (("SCALE-Sim, compute cycles", scalesim), ("Ramulator 2, share of the peak", ramulator)):
        for kind in dict.fromkeys(one.kind for one in rows):
            off = [abs(one.error) for one in rows if one.kind == kind]
            exact = sum(one == 0.0 for one in off)
            what = "reads of weights" if kind in STREAMS else "reads of lines" if rows is ramulator else "dataflow"
            lines.append((name, kind, what, str(len(off)), str(exact), f"{100 * max(off):.1f} %"))
    return [
        Part(
            "Simulators",
            (
                "Closed forms of the kernels beside what two simulators printed; nothing is fitted to them.",
                Grid(("simulator", "kind", "", "rows", "exact", "largest error"), tuple(lines), 3),
            ),
        )
    ]


def published_parts(result: Reproduction) -> list[Part]:
    """The published figures of arXiv 2512.04476 in short."""
    lines = []
    for row in result.rows:
        figure = row.figure
        shown = [
            f"{one.low:.3g} to {one.high:.3g}" if figure.kind == "range" else f"{one.low:.3g}"
            for one in (row.columns["evidence"], row.columns["calibrated"])
        ]
        published = " to ".join(f"{value:g}" for value in figure.value)
        fit = "yes" if figure.fit else "no"
        lines.append((figure.id, fit, "tok/s" if figure.kind == "rate" else "x", published, *shown))
    left_out = result.fit.leave_one_out_geomean_error
    return [
        Part(
            "Published figures",
            (
                "arXiv 2512.04476, without and with three constants fitted to the figures marked so; perfmodel"
                " reproduce shows more. Geometric-mean error over those figures: evidence"
                f" {100 * result.evidence_geomean_error:.1f} %, calibrated {100 * result.geomean_error:.1f} %, each"
                f" figure left out {'-' if left_out is None else f'{100 * left_out:.1f} %'}.",
                Grid(("figure", "fitted", "unit", "published", "evidence", "calibrated"), tuple(lines), 3),
            ),
        )
    ]


def case_parts(found: Validation) -> list[Part]:
    """What is asked one by one; a part whose rows the evidence does not have is left out."""
    rows = found.rows
    parts = [_fetched(rows), _cached(rows), _sweep(rows), _question(), _spread(rows), _failures(found)]
    return [part for part in parts if part is not None]


def _off(cell: Cell) -> tuple[str, ...]:
    return (str(cell.rows), share(cell.bias, sign=True), share(cell.median), share(cell.worst))


def _fetched(rows: tuple[Row, ...]) -> Part | None:
    from perfmodel.evidence.cases import fetched_machine

    found = fetched_machine(rows)
    if not found.cells:
        return None
    return Part(
        "A machine documented completely: experts fetched on a GH200",
        (
            "Mixtral-8x7B in BF16, batch about 20, one cache over all layers, by policy, prefetch and eight sizes of"
            " the cache. Copies are counted by the runs; the constants of the machine are its own benchmarks, and"
            " nothing is fitted to these speeds. Errors are of milliseconds a step.",
            Grid(("policy", "prefetch", "rows", "bias", "median", "worst"),
                 tuple((*one.label, *_off(one)) for one in found.cells), 2),
            f"Orders of the policies at one cache size and prefetch that are predicted exactly: {found.right} of"
            f" {found.rankings}; but for policies measured within 2 % of each other: {found.near} of {found.rankings}.",
        ),
    )  # fmt: skip


def _cached(rows: tuple[Row, ...]) -> Part | None:
    from perfmodel.evidence.cases import cached_machine, cached_prefill, cost_line

    found, passes = cached_machine(rows), cached_prefill(rows)
    if not found:
        return None
    return Part(
        "A machine documented completely: a cache on an RTX 5070, misses on a Ryzen 7950X",
        (
            "Qwen3-30B-A3B Q4_K_M. Milliseconds a token by slots of a layer; again nothing is fitted to these speeds.",
            Grid(("slots", "runs", "rows", "bias", "median", "worst"),
                 tuple((*one.label, *_off(one)) for one in found), 2),
            "The other runs are single prompts, scans of a setting and another build; one configuration differs by up"
            " to 15 % between sessions. At other numbers of slots, milliseconds a token by the regression of the"
            " machine's owner (misses and uploads from replayed hit rates):",
            Grid(("slots", "missed a token", "owner's", "predicted", "off"),
                 tuple((str(one.slots), f"{one.missed:.0f}", f"{one.owners_ms:.1f}", f"{one.predicted_ms:.1f}",
                        share(one.predicted_ms / one.owners_ms - 1.0, sign=True)) for one in cost_line(rows))),
            "Prefill, mean seconds of a prompt or of one of its passes:",
            Grid(("weights", "of", "rows", "measured", "predicted", "off"),
                 tuple((one.run, one.what, str(one.rows), f"{one.measured_s:.3f}", f"{one.predicted_s:.3f}",
                        share(one.predicted_s / one.measured_s - 1.0, sign=True)) for one in passes), 2),
        ),
    )  # fmt: skip


def _sweep(rows: tuple[Row, ...]) -> Part | None:
    from perfmodel.evidence.cases import batch_sweep

    found = batch_sweep(rows)
    if not found:
        return None
    lines = tuple(
        (
            f"{one.batch:g}", short(one.measured), short(one.own), share(one.own / one.measured - 1.0, sign=True),
            short(one.held_out), share(one.held_out / one.measured - 1.0, sign=True),
        )
        for one in found
    )  # fmt: skip
    return Part(
        "Batches of one engine: Qwen3-30B-A3B Q4_0 on an RTX 4090",
        (
            "tok/s. In sample, by the profile llama-cpp-cuda-2025, which has the switch from one kernel path to another"
            " at two tokens and was fitted to this sweep. Left out, by the shared constants, which have no such"
            " switch.",
            Grid(("batch", "measured", "in sample", "off", "left out", "off"), lines),
        ),
    )


def _question() -> Part:
    from perfmodel.evidence.cases import BATCHES, TOOLS, mixtral_question

    found = mixtral_question()
    lines = [
        ("bandwidth floor, uniform routing", "bytes over the peak rate", *map(_step, found.floor_ms)),
        ("perfmodel, ideal profile", "no software cost", *map(_step, found.ideal_ms)),
        ("perfmodel, vLLM profile", "shared constants", *map(_step, found.vllm_ms)),
        *((one.tool, one.why, *("-" if step is None else _step(step) for step in one.steps_ms)) for one in TOOLS),
    ]
    above = all(ideal >= floor for ideal, floor in zip(found.ideal_ms, found.floor_ms, strict=True))
    off = ", ".join(share(one, sign=True) for one in found.errors)
    return Part(
        "One question, several tools",
        (
            "Mixtral-8x7B in BF16 on two H100 SXM, context 1024: milliseconds of a decode step by batch, as the tools"
            " give them. None of them was compared with a GPU here.",
            Grid(("tool", "how", *(f"b = {batch}" for batch in BATCHES)), tuple(lines), 2),
            f"The vLLM profile against the tables of measured kernels: {off}. The ideal profile"
            f" {'never lies' if above else 'lies'} below the floor.",
        ),
    )  # fmt: skip


def _step(value: float) -> str:
    return f"{value:.2f}"


def _spread(rows: tuple[Row, ...]) -> Part | None:
    from perfmodel.evidence.cases import spread

    body: list[str | Grid] = []
    for model, gpu in (("gpt-oss-120b", "gb10"), ("qwen3-30b-a3b", "rtx-5090")):
        found = spread(rows, model, gpu)
        if len(found) < 2:
            continue
        low, high = found[0].measured, found[-1].measured
        lines = tuple(
            (
                row.run.id, row.run.source, str(row.run.engine), row.run.engine_version or "-",
                f"{row.run.expert_bits:g}", short(row.measured), short(row.held_out),
            )
            for row in found
        )  # fmt: skip
        body += [
            f"{model} on a {gpu}, batch 1: {short(low)} to {short(high)} tok/s, a factor of {high / low:.2f}.",
            Grid(("row", "source", "engine", "version", "bits", "measured", "left out"), lines, 4),
        ]
    if not body:
        return None
    return Part(
        "Spread that no model removes",
        (
            "One model on one machine, by different people, engines and files. No constant could meet all of them.",
            *body,
        ),
    )


def _failures(validation: Validation) -> Part | None:
    from perfmodel.cli.validate_alternatives import by_source_words
    from perfmodel.evidence.cases import known_failures

    found = known_failures(validation.rows)
    if not found:
        return None
    lines = tuple(
        (one.kind, one.quantity, str(one.errors.rows), str(one.errors.sources), *cells(one.errors.by_row),
         f"{one.errors.worst_factor:.1f}x")
        for one in found
    )  # fmt: skip
    header = (
        "kind", "of", "rows", "sources", "median", "p90", "bias", "within 1.25x", "within 1.5x", "worst",
    )  # fmt: skip
    return Part(
        "Where the model is known to fail",
        (
            by_source_words(validation),
            "Kinds of run that are off, with their source left out. A bias above 0 means that the model is too fast.",
            Grid(header, lines, 2),
            "What is likely behind it; nothing here proves it:",
            "\n".join(f"- {one.kind}: {one.why}" for one in found),
        ),
    )


def peer_part() -> Part:
    """What other tools publish about themselves."""
    return Part(
        "What other tools publish",
        (
            "As they or their users give it; none of it was repeated here. What was compared, and by which measure,"
            " differs, so that the figures do not rank the tools.",
            Grid(("tool", "compared with", "figures"), PEERS, 3),
        ),
    )
