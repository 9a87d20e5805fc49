"""``perfmodel rank``: every policy that applies, under equal GPU memory, in the order of a metric."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.answers import pair
from perfmodel.cli.base import (
    EXIT_BAD_INPUT,
    add_command,
    add_scenario,
    check_folder,
    load_model,
    load_plots,
    one_line,
    print_json,
    print_text,
    quoted,
    say,
)
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.answers.ranking import Ranked, Ranking

_SUFFIXES = ("png", "svg", "pdf")


def add(commands: Any) -> None:
    """Add the command."""
    text = "price every policy that applies on one trace with the same GPU memory, and sort them by a metric"
    one = add_command(commands, "rank", text, _rank)
    one.epilog = (
        "Policies that do not apply are listed with the reason. Exit code: 0, or 2 after bad input and where no policy"
        " applies."
    )
    add_scenario(one, policies=None)
    one.add_argument(
        "--policies",
        metavar="TEXT;TEXT",
        help="policies with their options, separated by semicolons; all stands for every one (default all)",
    )
    one.add_argument("--memory-budget", type=float, metavar="GB", help="GPU memory of every policy (default: system's)")
    one.add_argument(
        "--bits", type=float, metavar="N", help="stored bits of every policy that has an option bits and leaves it open"
    )
    one.add_argument(
        "--by", default="tpot_mean_s", metavar="METRIC", help="what decides, not the hit rate (default %(default)s)"
    )
    one.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="another number of the system, by dotted key; repeatable"
    )
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="DIR", help="also draw bars and a Pareto front there, as .png, .svg and .pdf")


def _rank(options: argparse.Namespace) -> int:
    from perfmodel.answers.ranked import NoPolicyError
    from perfmodel.answers.ranking import rank

    if options.plot is not None:
        if not options.plot:
            raise PerfModelError("--plot: found an empty name, allowed: a folder")
        check_folder("--plot", Path(options.plot))
    try:
        found = rank(
            load_model(options),
            options.system,
            options.trace,
            _policies(options.policies),
            prompt=options.prompt,
            output=options.output,
            batch=options.batch,
            batch_of=options.batch_of,
            micro_batch=options.micro_batch,
            memory_budget_gb=options.memory_budget,
            by=options.by,
            losses=options.loss,
            layers=options.layers,
            values=_values(options.set or []),
            bits=options.bits,
            engine=options.engine,
        )
    except NoPolicyError as error:
        if len(error.reasons) == 1:
            raise
        # A line for each reason: in one line those of many policies could not be read.
        say(f"perfmodel: error: {one_line(error.what)}")
        for reason in error.reasons:
            say(f"  {one_line(reason, 300)}")
        return EXIT_BAD_INPUT
    if options.plot is not None:
        _draw(found, Path(options.plot))
    if options.json:
        print_json(found.to_dict())
    else:
        print_text(ranking(found))
    return 0


def _policies(text: str | None) -> list[str] | None:
    if text is None:
        return None
    found = [one.strip() for one in text.split(";")]
    if not all(found):
        raise PerfModelError(f"--policies: found {quoted(text)}, allowed texts of policies separated by semicolons")
    return found


def _values(texts: list[str]) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for text in texts:
        key, value = pair("--set", text, "KEY=VALUE such as link.bandwidth_gb_per_s=32")
        if key in found:
            raise PerfModelError(f"--set: {quoted(key)} is given twice; allowed: one value for a key")
        try:
            found[key] = float(value)
        except ValueError:
            found[key] = value
    return found


def _draw(found: Ranking, folder: Path) -> None:
    plots = load_plots()
    figures = plots.rank_figures(found)
    # Written elsewhere first, so that an interrupt leaves neither an empty folder nor a part of the figures.
    with tempfile.TemporaryDirectory() as kept:
        for name, figure in figures.items():
            for suffix in _SUFFIXES:
                plots.save(figure, Path(kept, f"{name}.{suffix}"))
        folder.mkdir(parents=True, exist_ok=True)
        for one in sorted(Path(kept).iterdir()):
            shutil.move(one, folder / one.name)
    say(f"wrote {', '.join(f'{name}.png/.svg/.pdf' for name in figures)} to {folder}")
    if "rank_pareto" not in figures:
        say("no rank_pareto: no two policies have quantisation losses that are known and differ")


def ranking(found: Ranking) -> str:
    """A ranking as text."""
    from perfmodel.answers.ranking import grouped
    from perfmodel.reports import table

    first = found.rows[0].evaluation
    columns = [*_columns(first.batch), _quality(found.rows)]
    shown = {metric for metric, _, _ in columns}
    chosen = [] if found.metric.name in shown else [f"{found.metric.name} [{found.metric.unit}]"]
    header = ["", "policy", *chosen, *(name for _, name, _ in columns)]
    rows: list[list[str]] = []
    for place, one in enumerate(found.rows, 1):
        cells = [*([_number(one.value)] if chosen else []), *(cell(one) for _, _, cell in columns)]
        if rows and rows[-1][2:] == cells and _same_rule(found.rows[place - 2], one):
            rows[-1][1] += f", {one.label}"
        else:
            rows.append([str(place), one.label, *cells])
    parts = [
        f"{found.model.name} on {found.system.name} with {found.memory_gb:g} GB of GPU memory; routing of {first.trace}"
        f" ({first.trace_source}); mean prompt {first.prompt_tokens:g}, output {first.output_tokens:g} tokens,"
        f" {first.batch_text}",
        f"sorted by {found.metric.name} ({found.metric.meaning}; {found.metric.better} is better)",
        *(
            [f"set: {', '.join(f'{key}={_text(value)}' for key, value in found.values.items())}"]
            if found.values
            else []
        ),
        "",
        table(header, rows, left=2),
    ]
    if found.refused:
        reasons = [f"- {', '.join(labels)}: {reason}" for labels, reason in grouped(found.refused)]
        parts += ["", "Do not apply", *reasons]
    parts += ["", "How to read this", *(f"- {line}" for line in _reading(found))]
    if found.notes:
        parts += ["", "What was assumed", *(f"- {note}" for note in found.notes)]
    return "\n".join(parts)


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.10g}"


def _number(value: float | None, scale: float = 1.0, digits: int = 4) -> str:
    from perfmodel.reports import number

    return number(None if value is None else value * scale, digits)


def _amount(value: float) -> str:
    """Four digits without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 1000 else _number(value)


#: Metric that a column shows, or an empty name; its header; its cells.
_Column = tuple[str, str, "Callable[[Ranked], str]"]
_COLUMNS: tuple[_Column, ...] = (
    ("decode_tok_per_s", "tok/s", lambda one: _number(one.evaluation.decode_tok_per_s)),
    ("tpot_mean_s", "{step} ms", lambda one: _number(one.evaluation.tpot_mean_s, 1e3)),
    ("", "floor ms", lambda one: _number(one.evaluation.bandwidth_floor_s, 1e3)),
    ("ttft_s", "TTFT s", lambda one: _number(one.evaluation.ttft_s)),
    ("", "hits", lambda one: _number(one.evaluation.hit_rate.own, digits=3)),
    ("", "Belady", lambda one: _number(one.belady_hit_rate, digits=3)),
    ("gpu_memory_bytes", "GPU GB", lambda one: _number(one.gpu_memory_bytes, 1e-9)),
    ("", "link MB", lambda one: _amount(one.link_bytes * 1e-6)),
    ("", "binding", lambda one: one.evaluation.binding_resource),
    ("", "bits", lambda one: _number(one.bits, digits=3)),
)


def _columns(batch: int) -> list[_Column]:
    """The columns, a step being called a token where it is one."""
    step = "token" if batch == 1 else "step"
    return [(metric, header.format(step=step), cell) for metric, header, cell in _COLUMNS]


def _quality(rows: Sequence[Ranked]) -> _Column:
    """The loss as a share of the output variance, or as it is where that share is not known for all."""
    if any(one.evaluation.quant_loss is not None and one.evaluation.quant_noise is None for one in rows):
        return "quant_loss", "loss MSE", lambda one: _number(one.evaluation.quant_loss, digits=3)
    return "quant_noise", "loss %", lambda one: _number(one.evaluation.quant_noise, 100.0, 3)


def _same_rule(first: Ranked, second: Ranked) -> bool:
    """Whether one policy takes over the rule of the other."""
    from perfmodel.policies import POLICIES

    one, other = (POLICIES[row.label.partition(":")[0].strip()] for row in (first, second))
    return issubclass(one, other) or issubclass(other, one)


def _reading(found: Ranking) -> list[str]:
    """What equal memory means, what the bounds bound, and what the quality rests on."""
    from perfmodel.reports import intervals

    system = found.system
    labels, evaluations, known = zip(*((one.label, one.evaluation, one.uncertainty) for one in found.rows), strict=True)
    parts = {"near-data device": system.ndp, "CPU": system.cpu}
    present = [f"the {what} {part.name}" for what, part in parts.items() if part is not None]
    missing = [f"no {what}" for what, part in parts.items() if part is None]
    name, origin = found.losses
    share = "share of the output variance that is lost to quantisation [%]"
    quality = share if _quality(found.rows)[0] == "quant_noise" else "quantisation loss"
    return [
        f"equal memory: every policy has {found.memory_gb:g} GB on the GPU for the network, the KV cache of the longest"
        " context and what its rule keeps of the experts; a policy that needs less is not given more (column GPU)."
        " Host memory and near-data memory are the system's",
        *_widths(found),
        "policies near data need an ndp part and policies on the CPU a cpu part; this system has"
        f" {' and '.join([*present, *missing])}",
        "floor: the policy's own bytes over the datasheet rate of the busiest memory or link; no schedule of the same"
        " traffic is faster. link: weights and activations that cross it for a token",
        *intervals(labels, evaluations, known, ends=False),
        *_unresolved(found),
        "hits: expert in GPU memory before the layer asks, mean over sequences; the notes below count all picks alike"
        " and may differ a little. It does not predict speed, and nothing is sorted by it",
        "Belady: hits of a cache of the same slots and start that knows the future; caches on demand stay below it,"
        " those that copy ahead need not",
        f"loss: {quality} of the experts that decode picks, by loss table {name} ({origin}); 0 at the stored"
        " precision, - where the table cannot tell. No accuracy follows from it",
        f"weakest source among the hardware constants: {found.rows[0].evaluation.weakest_source}",
    ]


def _unresolved(found: Ranking) -> list[str]:
    """Which neighbours the known error does not tell apart, and what that does not mean."""
    places = {id(one): place for place, one in enumerate(found.rows, 1)}
    chains: list[list[int]] = []
    for one, other in found.unresolved:
        if chains and chains[-1][-1] == places[id(one)]:
            chains[-1].append(places[id(other)])
        else:
            chains.append([places[id(one)], places[id(other)]])
    if not chains:
        return []
    which = ", ".join(f"{chain[0]} to {chain[-1]}" for chain in chains)
    return [
        f"intervals of neighbours overlap in places {which}: the known error does not resolve their order. It is that"
        " of one prediction against one measurement; policies on one machine share part of it, nobody measured how much"
    ]


def _widths(found: Ranking) -> list[str]:
    """Whose experts run at which width."""
    stored = f"the stored {_number(float(found.model.expert_bits), digits=3)}"
    mixed = found.bits is None
    lines = ["bits: stored bits a weight of the experts that run in decode, mean over picks"]
    if found.reduced:
        lines[0] += (
            f"; below {stored}: {', '.join(found.reduced)}. They move and read less and lose precision for it, so"
            " compare them with their equals" + (", or give one width to all that take it (--bits)" if mixed else "")
        )
    else:
        lines[0] += f"; none below {stored}"
    if found.bits is not None:
        ran = [one.label for one in found.rows if one.label in found.given_bits]
        lines.append(
            f"--bits {found.bits:g} is the width of {', '.join(ran) or 'none of these'}; set by their text or"
            f" rule: {', '.join(found.own_bits) or 'none'}"
        )
    return lines
