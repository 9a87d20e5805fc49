"""``perfmodel trace record``: the routing of a real model that reads prompts and answers them."""

import argparse
import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perfmodel.cli.base import add_command, print_json, print_text, quoted, say
from perfmodel.cli.trace_output import add_output, check_output, trace_data
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.routing import RoutingTrace

#: Options that the recorder spells as Python does.
_OPTIONS = re.compile(r"\b(max_new_tokens|top_p|top_k|temperature|seed|keep_text|ignore_eos|dtype|device)\b")


def add(commands: Any) -> None:
    """Add the command."""
    one = add_command(commands, "record", "run a model on prompts and record which experts it uses", _record)
    one.epilog = (
        "Needs PyTorch and Transformers: pip install 'perfmodel[record]'. Nothing is fetched without --download."
    )
    one.add_argument(
        "--model",
        required=True,
        metavar="PATH_OR_ID",
        help="folder of a checkpoint (config.json, safetensors, tokenizer.json), or an id in the Hugging Face cache",
    )
    one.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help='one prompt a line; or .jsonl with "prompt" or "messages", and "label" if wanted',
    )
    one.add_argument(
        "--max-new-tokens", required=True, type=int, metavar="N", help="tokens to draw for every prompt, at most"
    )
    add_output(one)
    drawn = one.add_argument_group("how tokens are drawn")
    drawn.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="0 takes the likeliest token (default 1)"
    )
    drawn.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the likeliest tokens of this probability (default 1)",
    )
    drawn.add_argument("--top-k", type=int, metavar="N", help="keep the N likeliest tokens (default: all)")
    drawn.add_argument("--seed", type=int, default=0, metavar="S", help="of the random numbers (default 0)")
    drawn.add_argument("--ignore-eos", action="store_true", help="never draw a mark of the end")
    how = one.add_argument_group("how the model runs")
    how.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="to run in (default float32)"
    )
    how.add_argument("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:N or mps (default cpu)")
    how.add_argument("--download", action="store_true", help="fetch what is missing of an id from the Hugging Face Hub")
    one.add_argument("--name", metavar="TEXT", help="of the model in the trace (default: its id, or its folder's name)")
    one.add_argument("--keep-text", action="store_true", help="keep prompts and answers in the metadata, long ones cut")
    one.add_argument("--quiet", action="store_true", help="no progress bar")
    one.add_argument("--json", action="store_true", help="print what was recorded as one JSON document")


def _record(options: argparse.Namespace) -> int:
    from perfmodel.progress import bar, watched
    from perfmodel.record import record_trace

    place = check_output(options.out, overwrite=options.overwrite)
    with contextlib.ExitStack() as stack, options_as_written():
        shown = watched() and not options.quiet
        trace = record_trace(
            options.model,
            options.prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
            dtype=options.dtype,
            device=options.device,
            download=options.download,
            name=options.name,
            keep_text=options.keep_text,
            report=stack.enter_context(bar("model", "tokens")) if shown else None,
        )
    trace.save(place)
    document = _document(trace, options.out)
    if options.json:
        print_json(document)
    else:
        print_text(_text(document))
    say(f"wrote {options.out}")
    return 0


@contextlib.contextmanager
def options_as_written() -> Iterator[None]:
    """Errors of the recorder with its options as they stand on the command line: ``--top-k`` for ``top_k``."""
    try:
        yield
    except PerfModelError as error:
        subject, colon, rest = str(error).partition(":")
        named = _OPTIONS.sub(_written, subject)
        raise type(error)(named + colon + rest) from error


def _written(name: "re.Match[str]") -> str:
    return "--" + name[0].replace("_", "-")


def _document(trace: "RoutingTrace", out: str) -> dict[str, Any]:
    """What was recorded, as plain values."""
    metadata = {key: value for key, value in trace.metadata.items() if key != "texts"}
    return {"out": out, **trace_data(trace), "metadata": metadata}


def _text(found: dict[str, Any]) -> str:
    from perfmodel.routing.defects.rows import counted

    info, drawn = found["metadata"], found["metadata"]["sampling"]
    how = (
        "the likeliest token taken"
        if drawn["temperature"] == 0
        else f"drawn at temperature {drawn['temperature']:g}, top-p {drawn['top_p']:g}"
        + (f", top-k {drawn['top_k']}" if drawn["top_k"] else "")
        + f", seed {drawn['seed']}"
    )
    sequences = counted(found["sequences"], "sequence")
    return (
        f"model {quoted(info['model'])} ({info['family']}, {info['dtype']} on {info['device']}): "
        f"{counted(found['layers'], 'layer')}, top-{found['top_k']} of {found['num_experts']} experts\n"
        f"{sequences}: {found['prefill_tokens']:,} prompt tokens, {found['decode_tokens']:,} new ones ({how});"
        f" {info['ended']:,} ended before {info['max_new_tokens']:,} tokens or with them"
    )
