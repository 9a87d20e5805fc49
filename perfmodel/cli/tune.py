"""``perfmodel tune``: mean bits of every sequence from a limit on its latency or its loss."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.answers import exit_codes, finish, scenario_of
from perfmodel.cli.base import EXIT_NO_ANSWER, add_command, check_figure, load_plots, print_json, print_text, say
from perfmodel.errors import NoAnswerError, PerfModelError

if TYPE_CHECKING:
    from perfmodel.answers import Tuning
    from perfmodel.answers.control_choice import Compared

_DEFAULT = ("context-aware",)
#: One answer: the policy, and what was found, or why nothing was.
_Answer = tuple[str, "Tuning | NoAnswerError"]


def add(commands: Any) -> None:
    """Add the command."""
    text = "choose the mean bits of every sequence from a limit on its latency or its quantisation loss"
    one = add_command(commands, "tune", text, _tune)
    one.epilog = exit_codes("some sequence keeps the limit at no mean")
    limits = one.add_mutually_exclusive_group(required=True)
    limits.add_argument(
        "--target-tpot-ms", type=float, metavar="X", help="most bits with at most so much time per output token [ms]"
    )
    limits.add_argument(
        "--max-loss", type=float, metavar="Y", help="least time with at most this quantisation loss (MSE)"
    )
    limits.add_argument(
        "--max-noise", metavar="Y", help="least time with at most this loss over the output's variance: 0.03 or 3%%"
    )
    one.add_argument(
        "--metric", default="mean", metavar="NAME", help="time per output token: mean, max or p0 to p100 such as p99"
    )
    one.add_argument("-o", "--out", metavar="FILE", help="also save every mean priced (.nc, .zarr, .csv or .parquet)")
    one.add_argument("--plot", metavar="FILE", help="also draw latency against loss (.png, .svg or .pdf)")
    finish(one, f"repeatable, one answer each, without mean_bits; by default {_DEFAULT[0]}")


def _tune(options: argparse.Namespace) -> int:
    from perfmodel import progress
    from perfmodel.answers import tune

    _check_outputs(options)
    scenario = scenario_of(options, _DEFAULT)
    answers: list[_Answer] = []
    for label in scenario.labels:
        try:
            with progress.bar(label, "means") if progress.watched() else contextlib.nullcontext() as report:
                found: Tuning | NoAnswerError = tune(
                    scenario, target_tpot_ms=options.target_tpot_ms, max_loss=options.max_loss,
                    max_noise=options.max_noise, metric=options.metric, policy=label, progress=report,
                )  # fmt: skip
        except NoAnswerError as error:
            found = error
        answers.append((label, found))
    _write(options, scenario, [found for _, found in answers if not isinstance(found, NoAnswerError)])
    _print(options, scenario, answers)
    failed = (isinstance(found, NoAnswerError) or not found.met.all() for _, found in answers)
    return EXIT_NO_ANSWER if any(failed) else 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written before any work is done."""
    if options.plot is not None:
        check_figure("--plot", options.plot)
        load_plots()
        from perfmodel.plots.control import MOST_PANELS

        if len(options.policy or ()) > MOST_PANELS:
            raise PerfModelError(f"--plot: found {len(options.policy)} policies, allowed 1 to {MOST_PANELS}")
    if options.out is not None:
        from perfmodel.sweeps.outputs import check_output

        check_output(options.out)


def _write(options: argparse.Namespace, scenario: Any, found: list[Tuning]) -> None:
    """Files of what was found; without anything there are none."""
    for option in ("plot", "out"):
        if getattr(options, option) is not None and not found:
            say(f"--{option}: no sequence keeps the limit, so {getattr(options, option)} is not written")
    if options.plot is not None and found:
        plots = load_plots()
        plots.save(plots.control_figure(found, scenario), Path(options.plot))
        say(f"wrote {options.plot}")
    if options.out is not None and found:
        from perfmodel.answers.control_dataset import control_dataset
        from perfmodel.sweeps.dataset import save

        save(control_dataset(scenario, found), options.out)
        say(f"wrote {options.out}")


def _print(options: argparse.Namespace, scenario: Any, answers: list[_Answer]) -> None:
    from perfmodel.answers.control_front import AXIS
    from perfmodel.answers.provenance import described_by
    from perfmodel.cli.answer_reports import footer, provenance

    attrs = {**described_by(scenario, "tune", "tpot_mean_s", scenario.labels, [AXIS]), "notes": "[]"}
    if options.json:
        print_json({"answers": [_data(one) for one in answers], **provenance(attrs)})
    else:
        print_text("\n\n".join([*map(_text, answers), "\n".join(footer(attrs)[1:])]))


def _data(answer: _Answer) -> dict[str, Any]:
    """One answer for JSON; without one it says why, and every sequence's nearest."""
    label, found = answer
    if isinstance(found, NoAnswerError):
        return {"policy": label, "reason": str(found), **found.details}
    return {**found.to_dict(), "reason": None}


def _text(answer: _Answer) -> str:
    """One answer: a table of sequences, and one of what all of them come to."""
    import numpy as np

    from perfmodel.reports import table

    label, found = answer
    if isinstance(found, NoAnswerError):
        return str(found)

    asked, really = found.front.mean_bits, found.front.spent_bits
    beside_it = bool((np.abs(really - asked) > 1e-9).any())

    def numbers(mean: float, spent: float, latency_s: float, loss: float, noise: float) -> list[str]:
        bits = [f"{mean:.4g}", _known(spent)] if beside_it else [f"{mean:.4g}"]
        return [*bits, f"{1e3 * latency_s:.5g}", _known(loss), _known(100 * noise)]

    bits = ("mean bits", "spent") if beside_it else ("mean bits",)
    columns = (*bits, f"{found.metric.removesuffix('_s')} [ms]", "loss [MSE]", "noise [%]")
    rows = [
        [name, str(tokens), *numbers(*values), "yes" if met else "no"]
        for name, tokens, met, *values in zip(
            found.labels, found.front.tokens.tolist(), found.met.tolist(), found.mean_bits.tolist(),
            found.spent_bits.tolist(), found.latency_s.tolist(), found.loss.tolist(), found.noise.tolist(), strict=True,
        )
    ]  # fmt: skip
    every = len(found.labels)
    own = found.compared[0]
    beside = [
        [one.rule, *numbers(*one[1:6]), f"{one.met} of {every}", *_over(found.limit.what, one, own)]
        for one in found.compared
    ]
    best, ratio = ("most bits", "loss") if found.limit.what == "latency" else ("least time", "time")
    lines = [
        f"{label}: the mean with the {best} for every sequence, {found.asked}",
        "",
        table(("sequence", "tokens", *columns, "kept"), rows),
        "",
        table(("all sequences together", *columns, "kept by", f"{ratio} over own [1]"), beside),
        "",
    ]
    missed = every - int(found.met.sum())
    if missed:
        lines.append(f"note: {missed} of {every} sequences cannot keep the limit; their nearest mean is shown")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _known(value: float) -> str:
    """A number, or a dash for what the loss table cannot tell."""
    from perfmodel.reports import number

    return number(None if math.isnan(value) else value)


def _over(limited: str, one: Compared, own: Compared) -> list[str]:
    """What is given up under a rule, over what is with a mean for every sequence."""
    this, that = (one.loss, own.loss) if limited == "latency" else (one.latency_s, own.latency_s)
    return [_known(this / that if that else math.nan)]
