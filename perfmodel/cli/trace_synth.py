"""``perfmodel trace synth``: routing that was never recorded, like a recording or with a model's published skew."""

import argparse
import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, one_line, print_json, print_text, quoted, say
from perfmodel.cli.synth_reports import SETTABLE, Plan, fit_data, synth_data, synth_text
from perfmodel.cli.trace_output import add_output, check_output
from perfmodel.errors import PerfModelError, TraceError

if TYPE_CHECKING:
    from perfmodel.routing.synthetic import Skew

_PRESETS = ("mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b")
#: Sequences, prompt and output where nothing says otherwise.
_SEQUENCES, _PROMPT, _OUTPUT = 8, 128, 128


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "synth", "generate routing like a recording, or with a model's published skew", _synth)
    one.epilog = (
        f"Bundled profiles: {', '.join(_PRESETS)}. --set takes {', '.join(map(_option, SETTABLE))}. "
        "What is generated is marked synthetic, and every report says so."
    )
    source = one.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--like", metavar="FILE|NAME", help="fit to this recording; the fit is checked on held-out parts"
    )
    source.add_argument("--profile", metavar="NAME|FILE.npz", help="a bundled profile, or a frequency profile's file")
    one.add_argument("--layers", type=int, metavar="N", help="MoE layers (default: as the source)")
    one.add_argument("--experts", type=int, metavar="N", help="routed experts of a layer (default: as the source)")
    one.add_argument("--top-k", type=int, metavar="N", help="picks of a token (default: as the source)")
    one.add_argument(
        "--sequences", type=int, metavar="N", help=f"sequences (default: as the recording, or {_SEQUENCES})"
    )
    one.add_argument(
        "--prompt", type=int, metavar="N", help=f"prefill tokens of each (default: as recorded, or {_PROMPT})"
    )
    one.add_argument(
        "--output", type=int, metavar="N", help=f"decode steps of each (default: as recorded, or {_OUTPUT})"
    )
    one.add_argument("--expert-groups", type=int, default=1, metavar="N", help="equal groups of experts (default 1)")
    one.add_argument("--kept-groups", type=int, metavar="N", help="groups that one token picks from (default: all)")
    one.add_argument("--set", metavar="NAME=X[,...]", help="other parameters than those of the profile")
    one.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default 0)")
    add_output(one)
    one.add_argument("--quiet", action="store_true", help="no progress bar")
    one.add_argument("--json", action="store_true", help="print what was generated as one JSON document")


def _synth(options: argparse.Namespace) -> int:
    import numpy as np

    from perfmodel.routing.checks import as_count
    from perfmodel.routing.synthetic import generate
    from perfmodel.routing.synthetic_checks import MOST_SEQUENCES

    place = check_output(options.out, overwrite=options.overwrite)
    seed = as_count("--seed", options.seed, 0, None)
    for name, least in (("layers", 1), ("experts", 1), ("top_k", 1), ("prompt", 0), ("output", 0)):
        if getattr(options, name) is not None:
            as_count(_option(name), getattr(options, name), least, None)
    if options.sequences is not None:
        as_count("--sequences", options.sequences, 1, MOST_SEQUENCES)
    changes = _changes(options.set)
    with _options_named():
        if options.like is not None:
            if changes:
                raise PerfModelError("--set: found with --like, allowed with --profile: a fit finds parameters itself")
            plan = _like(options, seed, place)
        elif options.profile in _PRESETS:
            plan = _preset(options, changes)
        else:
            plan = _of_counts(options, changes)
        trace = generate(
            plan.sequences, plan.prompt, plan.output, *plan.shape, labels=plan.labels, seed=seed, model=plan.model,
            expert_groups=options.expert_groups,
            kept_groups=options.expert_groups if options.kept_groups is None else options.kept_groups,
            **plan.skew._asdict(),
        )  # fmt: skip
    if plan.layer_index is not None:
        trace = trace.map_layers(np.arange(trace.num_layers), plan.layer_index)
    if plan.fit is not None:
        trace = trace.with_metadata(fit=fit_data(plan.fit))
    trace.save(place)
    if options.json:
        print_json(synth_data(plan, trace, options.out))
    else:
        print_text(synth_text(plan, trace))
    say(f"wrote {options.out}")
    return 0


def _option(name: str) -> str:
    return name.replace("_", "-") if name in SETTABLE else "--" + name.replace("_", "-")


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """What the generator says of its arguments, said of the options that they came from."""
    options = {
        "num_sequences": "--sequences", "num_layers": "--layers", "num_experts": "--experts", "top_k": "--top-k",
        "prompt and output": "--prompt and --output", "prompt": "--prompt", "output": "--output",
        "layer_profile": "--profile", "expert_groups": "--expert-groups", "kept_groups": "--kept-groups",
    } | {key: f"--set: {_option(key)}" for key in SETTABLE}  # fmt: skip
    try:
        yield
    except TraceError as error:
        # The longest name first: one may begin with another.
        name = next((one for one in sorted(options, key=len, reverse=True) if str(error).startswith(f"{one} ")), None)
        if name is None:
            raise
        raise TraceError(options[name] + str(error)[len(name) :]) from error


def _changes(text: str | None) -> dict[str, float]:
    """Parameters from ``NAME=X,NAME=X``; their ranges are checked where they are used."""
    found: dict[str, float] = {}
    for piece in [] if text is None else text.split(","):
        name, equals, value = (part.strip() for part in piece.partition("="))
        key = name.replace("-", "_")
        if not equals or key not in SETTABLE:
            near = difflib.get_close_matches(key, SETTABLE, n=1)
            hint = f"; did you mean {_option(near[0])}?" if near else ""
            raise PerfModelError(
                f"--set: found {quoted(piece)}, allowed NAME=X with {', '.join(map(_option, SETTABLE))}{hint}"
            )
        if key in found:
            raise PerfModelError(f"--set: {name} is given twice, allowed: once")
        try:
            found[key] = float(value)
        except ValueError:
            raise PerfModelError(f"--set: {name} is {quoted(value)}, expected a number") from None
    return found


def _like(options: argparse.Namespace, seed: int, place: Path) -> Plan:
    """Parameters that fit a recording, and its lengths in turn."""
    from collections.abc import Mapping

    import numpy as np

    from perfmodel.progress import bar, watched
    from perfmodel.routing import RoutingTrace
    from perfmodel.routing.fitting import fit
    from perfmodel.routing.synthetic_checks import check_size, lengths
    from perfmodel.routing.trace import trace_path

    trace = RoutingTrace.load(options.like)
    if Path(trace_path(options.like)).resolve() == place:
        raise PerfModelError(f"output {one_line(options.out)}: is the recording itself; choose another output")
    shape = (trace.num_layers, trace.num_experts, trace.top_k)
    _same_shape(options, shape, "the recording")
    count = options.sequences or trace.num_sequences
    turn = np.arange(count) % trace.num_sequences
    decode = trace.sequence_lengths - trace.prompt_len
    prompts = lengths("--prompt", trace.prompt_len[turn] if options.prompt is None else options.prompt, count)
    outputs = lengths("--output", decode[turn] if options.output is None else options.output, count)
    check_size(prompts + outputs, *shape)
    with contextlib.ExitStack() as stack:
        shown = watched() and not options.quiet
        # The trials have a seed of their own, so that the trace is none of those that the fit was chosen by.
        report = stack.enter_context(bar("fit", "trials")) if shown else None
        try:
            found = fit(trace, seed=seed + 1, report=report)
        except TraceError as error:
            raise TraceError(f"{one_line(options.like)}: {error}") from error
    by_label = isinstance(found.skew.layer_profile, Mapping)
    return Plan(
        model=str(trace.metadata["model"]),
        shape=shape,
        layer_index=trace.layer_index,
        sequences=count,
        prompt=prompts,
        output=outputs,
        labels=tuple(trace.labels[s] for s in turn) if by_label and trace.labels else None,
        skew=found.skew,
        notes=list(found.notes),
        numbers=[],
        fit=found,
    )


def _preset(options: argparse.Namespace, changes: dict[str, float]) -> Plan:
    """A bundled profile."""
    from perfmodel.routing.presets import PRESETS

    preset = PRESETS[options.profile]
    own = (preset.num_layers, preset.num_experts, preset.top_k)
    asked = (options.layers, options.experts, options.top_k)
    layers, experts, top_k = (mine if other is None else other for mine, other in zip(own, asked, strict=True))
    notes = []
    if (experts, top_k) != own[1:]:
        notes.append(f"the parameters are those of top-{own[2]} of {own[1]} experts, used for top-{top_k} of {experts}")
    return Plan(
        model=preset.model,
        shape=(layers, experts, top_k),
        layer_index=preset.layer_index if layers == own[0] else None,
        skew=_changed(preset.skew, changes),
        numbers=[number._asdict() for number in preset.numbers],
        notes=notes,
        labels=None,
        **_lengths(options),
    )


def _of_counts(options: argparse.Namespace, changes: dict[str, float]) -> Plan:
    """The layers' skew of a frequency profile; nothing is known of sequences and tokens."""
    import math

    from perfmodel.routing.moments import frequencies_of
    from perfmodel.routing.profile import FrequencyProfile
    from perfmodel.routing.synthetic import Skew

    name = options.profile
    if not name.endswith(".npz") and "/" not in name:
        near = difflib.get_close_matches(name, _PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PerfModelError(
            f"--profile: found {quoted(name)}, allowed {', '.join(_PRESETS)}, or a frequency profile's .npz file{hint}"
        )
    profile = FrequencyProfile.load(name)
    top_k = options.top_k if profile.top_k is None else profile.top_k
    if top_k is None:
        raise PerfModelError(f"--top-k: not given, and {one_line(name)} does not say how many picks a token has")
    if "alpha" in changes:
        raise PerfModelError("--set: alpha is found with counts, allowed with a bundled profile: counts give the skew")
    shape = (profile.num_layers, profile.num_experts, top_k)
    _same_shape(options, shape, "the profile")
    notes = []
    unsaid = [_option(key) for key in ("sequence_concentration", "stickiness") if key not in changes]
    if unsaid:
        notes.append(
            f"counts say nothing of sequences and tokens, which do not vary but by chance ({', '.join(unsaid)})"
        )
    if (profile.shares() * top_k > 1).any():
        notes.append(f"some experts have more uses than tokens at top-{top_k}: they are picked by nearly every token")
    source = f"layers' skew from {profile.scale} of {profile.metadata['model']}; all else assumed"
    skew = Skew(math.inf, math.inf, 0.0, source, layer_profile=frequencies_of(profile.shares() * top_k, top_k))
    return Plan(
        model=str(profile.metadata["model"]),
        shape=shape,
        layer_index=profile.layer_index,
        skew=_changed(skew, changes),
        numbers=[],
        notes=notes,
        labels=None,
        **_lengths(options),
    )


def _same_shape(options: argparse.Namespace, shape: tuple[int, int, int], what: str) -> None:
    for name, own in zip(("layers", "experts", "top_k"), shape, strict=True):
        asked = getattr(options, name)
        if asked not in (None, own):
            raise PerfModelError(f"{_option(name)}: found {asked}, allowed {own}, which {what} has")


def _changed(skew: "Skew", changes: dict[str, float]) -> "Skew":
    if not changes:
        return skew
    said = ", ".join(f"{_option(key)} {value:g}" for key, value in changes.items())
    source = f"{skew.parameter_source}; chosen by the caller: {said}"
    return skew._replace(**changes, parameter_source=source)


def _lengths(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "sequences": options.sequences or _SEQUENCES,
        "prompt": _PROMPT if options.prompt is None else options.prompt,
        "output": _OUTPUT if options.output is None else options.output,
    }
