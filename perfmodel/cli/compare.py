"""``perfmodel compare`` and ``perfmodel policies``: what can be compared, on one point."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli.base import (
    add_command,
    add_scenario,
    check_figure,
    default_policies,
    load_machine,
    load_model,
    load_plots,
    load_trace,
    print_json,
    print_text,
    say,
)


def add(commands: Any) -> None:
    """Add the commands."""
    one = add_command(commands, "compare", "compare policies on one model, system and trace", _compare)
    add_scenario(one)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one.add_argument("--plot", metavar="FILE", help="also draw the comparison (.png, .svg or .pdf)")
    one.add_argument("--check", action="store_true", help="repeat every sum by the plain loop over picks (slow)")

    one = add_command(commands, "policies", "list the systems that can be compared, with their options", _policies)
    one.add_argument("--json", action="store_true", help="print one JSON document")


def _compare(options: argparse.Namespace) -> int:
    from perfmodel import reports
    from perfmodel.bitwidth import LossTable, losses_for
    from perfmodel.evidence.uncertainty import interval_for
    from perfmodel.run import make_replay, plan_run

    if options.plot is not None:
        check_figure("--plot", options.plot)
    model, system = load_model(options), load_machine(options)
    texts = options.policy or default_policies(system)
    trace = load_trace(options.trace)
    losses = None if options.loss is None else LossTable.load(options.loss)
    table = losses_for(losses, model)  # refuses another model's before any work
    how = options.layers, options.batch, options.batch_of
    replay = make_replay(model, trace, options.prompt, options.output, *how)
    runs = [plan_run(model, system, replay, text, losses=losses, micro_batch=options.micro_batch) for text in texts]
    evaluations = [run.price() for run in runs]
    differences = [_check(run, one) for run, one in zip(runs, evaluations, strict=True)] if options.check else None
    if options.plot is not None:
        plots = load_plots()
        capacity = {system.name: system.gpu.memory_capacity_bytes}
        plots.save(plots.comparison_figure(evaluations, labels=texts, gpu_capacity_bytes=capacity), Path(options.plot))
        say(f"wrote {options.plot}")
    known = [interval_for(one, system) for one in evaluations]
    if options.json:
        print_json(reports.comparison_data(evaluations, model, system, trace, table, differences, known))
    else:
        print_text(reports.comparison(evaluations, differences, known))
    return 0


def _check(run: Any, evaluation: Any) -> float:
    """Largest relative difference between the states and the plain loop over every pick."""
    from perfmodel.oracle import largest_difference, per_pick

    return largest_difference(evaluation, per_pick(run))


def _policies(options: argparse.Namespace) -> int:
    from perfmodel import reports

    if options.json:
        print_json(reports.policies_data())
    else:
        print_text(reports.policies())
    return 0
