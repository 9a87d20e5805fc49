"""``perfmodel model``: what a config says of a network, what it takes of memory, and what is understood."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, add_formats, formats, print_json, print_text, quoted
from perfmodel.errors import ModelConfigError, PerfModelError

if TYPE_CHECKING:
    from perfmodel.cli.model_data import Caching
    from perfmodel.memory import MemoryReport, Options
    from perfmodel.model import MoEModel

#: Largest context and batch, as in `perfmodel.memory`.
_MOST = 10**9
#: What only a system gives a meaning to: option and the name of its value.
_OF_SYSTEM = {
    "--policy": "policy",
    "--gpu-experts": "gpu_experts",
    "--expert-parallel": "expert_parallel",
    "--tensor-parallel": "tensor_parallel",
    "--pipeline-parallel": "pipeline_parallel",
}


def add(commands: Any) -> None:
    """Add the group of commands."""
    group = commands.add_parser("model", help="read a model's config: parameters, bytes, KV cache, and what fits")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    one = add_command(actions, "show", "a card: shape, parameters, bytes, KV cache, what fits, every assumption", _show)
    _add_options(one)
    one.add_argument("--layers", action="store_true", help="also print the parameters of every layer")
    one = add_command(actions, "fit", "memory by device; refused with the sum when it does not fit", _fit)
    _add_options(one, system_required=True)
    one = add_command(actions, "families", "the model types that are read, with the keys of their configs", _families)
    one.add_argument("--json", action="store_true", help="print one JSON document")
    one = add_command(actions, "formats", "the formats of stored weights, with their exact bits", _formats)
    one.add_argument("--json", action="store_true", help="print one JSON document")


def _add_options(parser: argparse.ArgumentParser, *, system_required: bool = False) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config.json, its folder, a GGUF file, or a bundled name")
    parser.add_argument("--system", required=system_required, metavar="SPEC", help="system spec: does it fit there?")
    parser.add_argument("--policy", metavar="NAME[:key=value,...]", help="policy that places the experts")
    parser.add_argument("--gpu-experts", type=int, metavar="N", help="experts of every layer on the GPU (default: all)")
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens a sequence (default 4096)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default 1)")
    add_formats(parser)
    parser.add_argument("--kv-bits", type=float, metavar="N", help="bits of a cached number (default: config's, or 16)")
    # The choices are those of the package, which help and mistakes need not load.
    parser.add_argument(
        "--kv-layout",
        choices=("capped", "full", "llama.cpp"),
        default="capped",
        help="room that sliding windows get (default capped)",
    )
    parser.add_argument(
        "--mla-cache",
        choices=("compressed", "expanded"),
        default="compressed",
        help="what latent attention caches (default compressed)",
    )
    parser.add_argument(
        "--kernel-supports",
        metavar="F,...",
        help="formats that the engine computes on, or none; weights in others are unpacked to bfloat16",
    )
    for name, what in (
        ("expert", "experts of a layer"),
        ("tensor", "matrices of attention, dense and shared networks"),
        ("pipeline", "layers"),
    ):
        parser.add_argument(f"--{name}-parallel", type=int, metavar="N", help=f"ranks that divide the {what}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _show(options: argparse.Namespace) -> int:
    from perfmodel.cli.model_data import card, layer_rows
    from perfmodel.cli.model_reports import card_text, layers_text

    model, caching, notes = _read(options)
    report = None if options.system is None else _report(options, model, caching)
    data = card(model, caching, notes, report, None if report is None else _largest(options, model, caching))
    rows = layer_rows(model) if options.layers else None
    if options.json:
        print_json(data if rows is None else {**data, "layers": rows})
    else:
        print_text(card_text(data) + ("" if rows is None else f"\n\n{layers_text(rows)}"))
    return 0


def _fit(options: argparse.Namespace) -> int:
    from perfmodel.cli.model_data import fit
    from perfmodel.cli.model_reports import fit_text

    model, caching, notes = _read(options)
    report = _report(options, model, caching)
    report.check()
    data = fit(model, notes, report, _largest(options, model, caching))
    if options.json:
        print_json(data)
    else:
        print_text(fit_text(data))
    return 0


def _families(options: argparse.Namespace) -> int:
    from perfmodel.cli.model_known import families_data, families_text

    data = families_data()
    if options.json:
        print_json(data)
    else:
        print_text(families_text(data))
    return 0


def _formats(options: argparse.Namespace) -> int:
    from perfmodel.cli.model_known import formats_data, formats_text

    data = formats_data()
    if options.json:
        print_json(data)
    else:
        print_text(formats_text(data))
    return 0


# ---- from the options to the model and its memory ----


def _read(options: argparse.Namespace) -> tuple["MoEModel", "Caching", tuple[str, ...]]:
    """The model with its weights and cache stored as the options say, and sentences on that."""
    from perfmodel.cli.model_data import Caching
    from perfmodel.model import MoEModel
    from perfmodel.model.numbers import bits_of

    unused = [option for option, name in _OF_SYSTEM.items() if getattr(options, name) is not None]
    if options.system is None and unused:
        raise PerfModelError(f"{unused[0]}: found without --system, allowed together")
    for option, least in (("context", 0), ("batch", 1)):
        value = getattr(options, option)
        if not least <= value <= _MOST:
            raise PerfModelError(f"--{option}: found {quoted(str(value))}; allowed: an integer from {least} to {_MOST}")
    asked_bits = None if options.kv_bits is None else bits_of(options.kv_bits, "--kv-bits")
    model = MoEModel.from_config(options.config)
    notes = []
    if options.dtype:
        choices = formats(options)
        model = model.stored_as(choices)
        notes.append(f"weights are stored as asked for: {', '.join(choices)}")
    if options.kernel_supports is not None:
        names = _kernels(options.kernel_supports, model)
        loaded = dataclasses.replace(model, storage=model.storage.upcast(names))
        if loaded.storage != model.storage:
            loaded = dataclasses.replace(loaded, compute="bfloat16")
            notes.append(
                f"the engine computes on {', '.join(names) or 'no packed format'}; "
                "other formats below 16 bits are unpacked to bfloat16"
            )
        model = loaded
    bits = model.kv_bits if asked_bits is None else asked_bits
    if bits is None:
        bits = 16.0
        notes.append("the cache holds numbers of 16 bits")
    return model, Caching(options.context, options.batch, bits, options.kv_layout, options.mla_cache), tuple(notes)


def _kernels(text: str, model: "MoEModel") -> tuple[str, ...]:
    from perfmodel.storage import FORMATS

    if text.strip().lower() == "none":
        return ()
    known = {*FORMATS, *(part.name for one in model.storage.by_class().values() for part, _ in one.parts)}
    names = tuple(name.strip().lower() for name in text.split(","))
    for name in names:
        if name not in known and not any(one.startswith(f"{name}_") for one in known):
            raise ModelConfigError(
                f"--kernel-supports: found {quoted(name)}; allowed: none, or names of formats separated by commas: "
                + ", ".join(sorted(known))
            )
    return names


def _asked(options: argparse.Namespace, caching: "Caching") -> "Options":
    from perfmodel.memory import Parallel

    return {
        "policy": options.policy,
        "context": caching.context,
        "batch": caching.batch,
        "kv_bits": caching.bits,
        "kv_layout": caching.layout,
        "mla_cache": caching.mla_cache,
        "gpu_experts": options.gpu_experts,
        "parallel": Parallel(
            **{
                name: degree
                for name in ("expert", "tensor", "pipeline")
                if (degree := getattr(options, f"{name}_parallel")) is not None
            }
        ),
    }


def _report(options: argparse.Namespace, model: "MoEModel", caching: "Caching") -> "MemoryReport":
    from perfmodel.hardware import load_system
    from perfmodel.memory import memory_report

    return memory_report(model, load_system(options.system), **_asked(options, caching))


def _largest(options: argparse.Namespace, model: "MoEModel", caching: "Caching") -> dict[str, Any]:
    """The most that fits, each with the other options as they are."""
    from perfmodel.hardware import load_system
    from perfmodel.memory import largest_batch, largest_context, largest_gpu_experts

    system, asked = load_system(options.system), _asked(options, caching)
    experts = largest_gpu_experts(model, system, **asked) if model.num_moe_layers else None
    return {
        "batch": largest_batch(model, system, **asked),
        "context_tokens": largest_context(model, system, **asked),
        "gpu_experts": None if experts is None else experts._asdict(),
    }
