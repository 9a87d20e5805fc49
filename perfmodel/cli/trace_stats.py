"""``perfmodel trace stats``: what a recording of routing looks like."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, check_folder, load_plots, print_json, print_text, quoted, say
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.progress import Report

#: Each figure is written as .png and .svg.
_SUFFIXES = ("png", "svg")


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(
        commands, "stats", "describe routing: skew, reuse, similarity of the phases, hit rates, caches", _stats
    )
    one.add_argument("trace", metavar="FILE|NAME", help="trace or frequency profile (.npz), or a bundled trace's name")
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="DIR", help="also draw figures there, each as .png and .svg")
    one.add_argument("--lags", metavar="N,...", help="tokens back at which reuse is measured (default: 1,2,4,8,16,32)")
    one.add_argument("--windows", metavar="N,...", help="tokens of windows with distinct experts (default: 2,8,32,128)")
    one.add_argument("--seed", type=int, metavar="N", help="of resampling and drawn batches (default: 0)")
    one.add_argument(
        "--sequence", type=int, metavar="N", help="sequence of the step x expert map (default: first of both phases)"
    )
    one.add_argument("--quiet", action="store_true", help="no progress bar")


def _stats(options: argparse.Namespace) -> int:
    if options.plot is not None:
        if not options.plot:
            raise PerfModelError("--plot: found an empty name, allowed: a folder")
        check_folder("--plot", Path(options.plot))
    from perfmodel.routing.checks import as_count
    from perfmodel.routing.statistics.reading import MAX_LAG, MAX_SEED, MAX_WINDOW

    chosen = {
        "lags": _counts("--lags", options.lags, MAX_LAG),
        "windows": _counts("--windows", options.windows, MAX_WINDOW),
        "seed": None if options.seed is None else as_count("--seed", options.seed, 0, MAX_SEED),
    }
    if options.sequence is not None and options.plot is None:
        raise PerfModelError("--sequence: found without --plot, allowed together")
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return _trace(options, chosen) if _is_trace(options.trace) else _profile(options, chosen)


def _is_trace(source: str) -> bool:
    """Whether to read a trace; everything but a frequency profile, so that errors are those of a trace."""
    from perfmodel.routing.npz import npz_keys
    from perfmodel.routing.profile import PROFILE_KEYS
    from perfmodel.routing.trace import trace_path

    keys = set(npz_keys(trace_path(source)))
    return "topk_ids" in keys or not keys >= PROFILE_KEYS


def _trace(options: argparse.Namespace, chosen: dict[str, Any]) -> int:
    from perfmodel.cli.trace_reports import survey_data, survey_text
    from perfmodel.routing.blocks import open_trace
    from perfmodel.routing.checks import as_count
    from perfmodel.routing.statistics import survey

    with _bar(options, "check") as report:
        opened = open_trace(options.trace, report=report)
    if options.sequence is not None:
        as_count("--sequence", options.sequence, 0, opened.num_sequences - 1)
    with _bar(options, "survey") as report:
        found = survey(opened, **chosen, report=report)
    if options.plot is not None:
        plots = load_plots()
        steps = plots.read_steps(opened, options.sequence)
        _write(plots, plots.survey_figures(found, steps), Path(options.plot))
    if options.json:
        print_json(survey_data(found))
    else:
        print_text(survey_text(found))
    return 0


def _bar(options: argparse.Namespace, label: str) -> contextlib.AbstractContextManager["Report | None"]:
    """A bar of the rows read, where somebody watches."""
    from perfmodel.progress import bar, watched

    return bar(label, "tokens") if watched() and not options.quiet else contextlib.nullcontext()


def _profile(options: argparse.Namespace, chosen: dict[str, Any]) -> int:
    from perfmodel.cli.profile_reports import profile_data, profile_text
    from perfmodel.routing.profile import FrequencyProfile

    profile = FrequencyProfile.load(options.trace)
    given = [*chosen, *(["sequence"] if options.sequence is not None else [])]
    if given:
        raise PerfModelError(
            f"{', '.join(f'--{name}' for name in given)}: found with a frequency profile, which holds no single tokens;"
            " allowed with a trace"
        )
    if options.plot is not None:
        plots = load_plots()
        _write(plots, {"experts": plots.profile_figure(profile)}, Path(options.plot))
    if options.json:
        print_json(profile_data(profile))
    else:
        print_text(profile_text(profile))
    return 0


def _write(plots: Any, figures: dict[str, Any], folder: Path) -> None:
    for name, figure in figures.items():
        for suffix in _SUFFIXES:
            plots.save(figure, folder / f"{name}.{suffix}")
    say(f"wrote {', '.join(f'{name}.png/.svg' for name in figures)} to {folder}")


def _counts(option: str, text: str | None, highest: int) -> tuple[int, ...] | None:
    """Whole numbers separated by commas; None where the option is not given."""
    from perfmodel.routing.statistics.reading import counts

    if text is None:
        return None
    try:
        listed = [int(part) for part in text.split(",")]
    except ValueError:
        raise PerfModelError(f"{option}: found {quoted(text)}; allowed: whole numbers separated by commas") from None
    return tuple(counts(option, listed, highest).tolist())
