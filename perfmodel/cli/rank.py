"""``perfmodel rank``: every policy that applies, under equal GPU memory, in the order of a metric."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.answers import pair
from perfmodel.cli.base import (
    add_command,
    add_scenario,
    check_folder,
    load_plots,
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
        "--by", default="tpot_mean_s", metavar="METRIC", help="what decides, not the hit rate (default %(default)s)"
    )
    one.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="another number of the system, by dotted key; repeatable"
    )
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="DIR", help="also draw bars and a Pareto front there, as .png, .svg and .pdf")


def _rank(options: argparse.Namespace) -> int:
    from perfmodel.answers.ranking import rank

    if options.plot is not None:
        if not options.plot:
            raise PerfModelError("--plot: found an empty name, allowed: a folder")
        check_folder("--plot", Path(options.plot))
    found = rank(
        options.model,
        options.system,
        options.trace,
        _policies(options.policies),
        prompt=options.prompt,
        output=options.output,
        memory_budget_gb=options.memory_budget,
        by=options.by,
        losses=options.loss,
        layers=options.layers,
        values=_values(options.set or []),
    )
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
    for name, figure in figures.items():
        for suffix in _SUFFIXES:
            plots.save(figure, folder / f"{name}.{suffix}")
    say(f"wrote {', '.join(f'{name}.png/.svg/.pdf' for name in figures)} to {folder}")


def ranking(found: Ranking) -> str:
    """A ranking as text."""
    from perfmodel.answers.ranking import grouped
    from perfmodel.reports import table

    first = found.rows[0].evaluation
    chosen = [] if found.metric.name in _SHOWN else [f"{found.metric.name} [{found.metric.unit}]"]
    header = ["", "policy", *chosen, *(name for name, _ in _COLUMNS)]
    rows = [_row(place, one, bool(chosen)) for place, one in enumerate(found.rows, 1)]
    parts = [
        f"{found.model.name} on {found.system.name} with {found.memory_gb:g} GB of GPU memory; routing of {first.trace}"
        f" ({first.trace_source}); mean prompt {first.prompt_tokens:g}, output {first.output_tokens:g} tokens, batch 1",
        f"sorted by {found.metric.name} ({found.metric.meaning}; {found.metric.better} is better)",
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


#: Metrics that every ranking shows.
_SHOWN = ("tpot_mean_s", "decode_tok_per_s", "ttft_s", "gpu_memory_bytes", "busy_link_s", "quant_loss", "quant_noise")


def _number(value: float | None, scale: float = 1.0, digits: int = 4) -> str:
    from perfmodel.reports import number

    return number(None if value is None else value * scale, digits)


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("tok/s", lambda one: _number(one.evaluation.decode_tok_per_s)),
    ("token [ms]", lambda one: _number(one.evaluation.tpot_mean_s, 1e3)),
    ("floor [ms]", lambda one: _number(one.evaluation.bandwidth_floor_s, 1e3)),
    ("TTFT [s]", lambda one: _number(one.evaluation.ttft_s)),
    ("hit rate", lambda one: _number(one.evaluation.hit_rate.own, digits=3)),
    ("Belady", lambda one: _number(one.belady_hit_rate, digits=3)),
    ("GPU [GB]", lambda one: _number(one.gpu_memory_bytes, 1e-9)),
    ("link [MB/token]", lambda one: _number(one.link_bytes, 1e-6)),
    ("link busy [%]", lambda one: _number(one.link_busy, 100.0, 3)),
    ("binding", lambda one: one.evaluation.binding_resource),
    ("loss [MSE]", lambda one: _number(one.evaluation.quant_loss, digits=3)),
    ("noise [%]", lambda one: _number(one.evaluation.quant_noise, 100.0, 3)),
)


def _row(place: int, one: Ranked, chosen: bool) -> list[str]:
    value = [_number(one.value)] if chosen else []
    return [str(place), one.label, *value, *(cell(one) for _, cell in _COLUMNS)]


def _reading(found: Ranking) -> list[str]:
    """What equal memory means, what the bounds bound, and what the quality rests on."""
    system = found.system
    parts = {"near-data device": system.ndp, "CPU": system.cpu}
    present = [f"the {what} {part.name}" for what, part in parts.items() if part is not None]
    missing = [f"no {what}" for what, part in parts.items() if part is None]
    name, origin = found.losses
    return [
        f"equal memory: every policy has {found.memory_gb:g} GB on the GPU for the network, the KV cache of the longest"
        " context and what its rule keeps of the experts; a policy that needs less is not given more (column GPU)."
        " Host memory and near-data memory are the system's",
        "policies near data need an ndp part and policies on the CPU a cpu part; this system has"
        f" {' and '.join([*present, *missing])}",
        "floor: the policy's own bytes over the datasheet rate of the busiest memory or link; no schedule of the same"
        " traffic is faster",
        "Belady: hit rate of a cache of the same slots and start that knows the future; caches on demand stay below"
        " it, those that copy ahead need not",
        "hit rate: expert in GPU memory before the layer asks; it does not predict speed, and nothing is sorted by it",
        f"loss: mean output error of the experts that decode picks, by loss table {name} ({origin}); 0 at the stored"
        " precision, - where the table cannot tell. No accuracy follows from it",
        f"weakest source among the hardware constants: {found.rows[0].evaluation.weakest_source}",
    ]
