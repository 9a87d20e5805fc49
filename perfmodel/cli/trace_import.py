"""``perfmodel trace import``: recordings that other tools wrote; ``perfmodel trace formats``: which ones are read."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, print_json, print_text, quoted, say
from perfmodel.cli.trace_check import finding_rows, findings_text, mend_names, say_unneeded
from perfmodel.cli.trace_output import add_output, check_output, trace_data
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.routing.importers.base import Imported, ImportOptions
    from perfmodel.routing.profile import FrequencyProfile
    from perfmodel.routing.trace import RoutingTrace


def add(commands: Any) -> None:
    """Add both commands."""
    one = add_command(commands, "import", "read a recording that another tool wrote, and save it as a trace", _import)
    one.epilog = "Counts alone become a frequency profile, which places experts but cannot be replayed."
    one.add_argument("format", metavar="FORMAT", help="see perfmodel trace formats; auto: told by the first file")
    one.add_argument("files", metavar="FILE", nargs="+", help="files of one recording, in its order")
    add_output(one, required=True)
    one.add_argument("--model", metavar="NAME", help="name of the recorded model")
    one.add_argument("--num-experts", metavar="N", help="routed experts of a layer")
    one.add_argument("--top-k", metavar="N", help="picks of a token in a layer")
    one.add_argument("--prompt-len", metavar="N[,N...]|FILE", help="prefill rows: of every sequence, or one for each")
    one.add_argument("--sequence-len", metavar="N[,N...]|FILE", help="rows: of every sequence, or one for each")
    one.add_argument("--layers", metavar="N,N,...|A-B", help="model layer of every row of the layer axis")
    one.add_argument("--family", metavar="NAME", help="model family, whose rule turns router logits into picks")
    one.add_argument("--config", metavar="FILE", help="the model's config.json, or its folder")
    one.add_argument("--expert-map", metavar="FILE", help="expert in every slot [layers, slots] (.json, .npy)")
    one.add_argument("--mend", metavar="NAME[,NAME...]", help="defects to mend (see perfmodel trace check)")
    one.add_argument("--json", action="store_true", help="print what was imported as one JSON document")

    other = add_command(commands, "formats", "list the layouts of recordings that can be imported", _formats)
    other.add_argument("--json", action="store_true", help="print one JSON document")


def _import(options: argparse.Namespace) -> int:
    from perfmodel.routing.importers import import_files

    said = _options(options)
    place = check_output(options.out, overwrite=options.overwrite)
    imported = import_files(options.format, options.files, said)
    imported.result.save(place)
    if options.json:
        print_json(_document(imported, options.out))
    else:
        print_text(f"{_text(imported)}\n{findings_text(imported.findings)}")
    say_unneeded(said.mend, imported.findings)
    say(f"wrote {options.out}")
    return 0


def _options(options: argparse.Namespace) -> "ImportOptions":
    """What was said, as numbers and names."""
    from perfmodel.routing.importers.options import options_of

    one = {name: getattr(options, name) for name in ("model", "family", "config", "expert_map")}
    several = {name: _numbers(name, getattr(options, name)) for name in ("prompt_len", "sequence_len", "layers")}
    counts = {name: _number(name, getattr(options, name)) for name in ("num_experts", "top_k")}
    mend = None if options.mend is None else mend_names(options.mend)
    return options_of({**one, **several, **counts, "mend": mend})


def _number(name: str, text: str | None) -> int | None:
    from perfmodel.routing.importers.base import option_name

    found = None if text is None else _numbers(name, text, files=False)
    if found is not None and len(found) != 1:
        raise PerfModelError(f"{option_name(name)}: found {len(found)} numbers, allowed one")
    return None if found is None else found[0]


def _numbers(name: str, text: str | None, *, files: bool = True) -> list[int] | None:
    """Numbers between commas; of layers also ranges A-B; of lengths also a file of numbers."""
    from perfmodel.routing.importers.base import option_name
    from perfmodel.routing.importers.files import integer
    from perfmodel.routing.importers.options import MOST_NUMBERS, bounds

    if text is None:
        return None
    if files and name != "layers" and not re.fullmatch(r"[0-9, +-]*", text):
        return _numbers_of_file(text, option_name(name))
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-") if name == "layers" else (part, "", "")
        first = integer(low, option_name(name), *bounds(name))
        last = integer(high, option_name(name), *bounds(name)) if dash else first
        if last < first:
            raise PerfModelError(f"{option_name(name)}: the range {first}-{last} falls, allowed: {last}-{first}")
        if len(found) + last - first >= MOST_NUMBERS:
            raise PerfModelError(f"{option_name(name)}: more than {MOST_NUMBERS:,} numbers")
        found.extend(range(first, last + 1))
    return found


def _numbers_of_file(path: str, option: str) -> list[int]:
    """Integers of a text file, between commas, blanks or line breaks."""
    from perfmodel.routing.importers.files import columns, integer, read_lines

    found: list[int] = []
    if not Path(path).exists():
        raise PerfModelError(
            f"{option}: {quoted(path)}: no such file (allowed: integers between commas, or a file of them)"
        )
    for number, line in read_lines(Path(path), most=2**24):
        where = f"{option}: {path}: line {number}"
        plain = " ".join(line.replace(",", " ").split())
        if plain:
            found += [integer(one, where) for one in columns(plain, " ", where)]
    if not found:
        raise PerfModelError(f"{option}: {path}: holds no numbers")
    return found


def _document(imported: "Imported", out: str) -> dict[str, Any]:
    """What was imported, as plain values."""
    from perfmodel.routing import RoutingTrace

    result = imported.result
    if isinstance(result, RoutingTrace):
        shape = {**trace_data(result), "weights": result.topk_weights is not None}
    else:
        shape = {
            "layers": result.num_layers,
            "num_experts": result.num_experts,
            "top_k": result.top_k,
            "layer_index": result.layer_index.tolist(),
            "metadata": result.metadata,
            "scale": result.scale,
        }
    return {
        "out": out,
        "kind": "trace" if isinstance(result, RoutingTrace) else "profile",
        **shape,
        "findings": finding_rows(imported.findings),
    }


def _text(imported: "Imported") -> str:
    from perfmodel.routing import RoutingTrace

    result = imported.result
    return _trace_text(result) if isinstance(result, RoutingTrace) else _profile_text(result)


def _trace_text(trace: "RoutingTrace") -> str:
    from perfmodel.routing.defects.rows import counted

    prefill = int(trace.prompt_len.sum())
    weights = "without gate weights" if trace.topk_weights is None else "with gate weights"
    inferred = " (the largest found; --num-experts says the number)" if trace.num_experts_inferred else ""
    rows = f"{prefill:,} prefill and {trace.num_tokens - prefill:,} decode rows"
    return (
        f"trace of {trace.metadata['model']}, {trace.metadata.get('how', trace.metadata['source'])}\n"
        f"{counted(trace.num_sequences, 'sequence')}: {rows}, {weights}\n"
        f"{_layers(trace)}, top-{trace.top_k} of {trace.num_experts} experts{inferred}"
    )


def _profile_text(profile: "FrequencyProfile") -> str:
    picks = "" if profile.top_k is None else f", top-{profile.top_k}"
    return (
        f"frequency profile of {profile.metadata['model']}, {profile.metadata['how']}: {profile.scale} alone, so it "
        f"places experts but cannot be replayed\n"
        f"{_layers(profile)} of {profile.num_experts} experts{picks}"
    )


def _layers(found: "RoutingTrace | FrequencyProfile") -> str:
    from perfmodel.routing.defects.rows import counted

    return f"{counted(found.num_layers, 'layer')} ({_ranges(found.layer_index.tolist())})"


def _ranges(numbers: list[int]) -> str:
    """Increasing numbers, those that follow one another as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][-1] = number
        else:
            runs.append([number, number])
    every = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(every if len(every) <= 12 else [*every[:12], "..."])


def _formats(options: argparse.Namespace) -> int:
    from perfmodel.routing.importers import formats
    from perfmodel.routing.importers.base import option_name

    rows = [
        {
            "name": one.name,
            "gives": one.gives,
            "summary": one.summary,
            "files": one.files,
            "options": sorted(map(option_name, one.takes)),
        }
        for one in formats().values()
    ]
    if options.json:
        print_json(rows)
        return 0
    lines = []
    for gives, title in (("trace", "Traces, with the picks of every token:"), ("profile", "Counts alone:")):
        lines.append(title)
        for row in rows:
            if row["gives"] == gives:
                lines += [f"  {row['name']}: {row['summary']}", f"    files: {row['files']}"]
                lines.append(f"    options: {', '.join(row['options'])}")
    print_text("\n".join(lines))
    return 0
