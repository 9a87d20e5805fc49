"""The recorder: which experts a real model uses while it reads prompts and answers them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.progress import Report, check_report
from perfmodel.record.blocks import Outline, expert_blocks, load_model, outline
from perfmodel.record.chat import Reader
from perfmodel.record.checkpoints import find_checkpoint
from perfmodel.record.device import check_device, place
from perfmodel.record.generate import Generation, Generator, marks_of_end
from perfmodel.record.libraries import import_torch, import_transformers, quiet
from perfmodel.record.options import at_least, check_dtype, flag
from perfmodel.record.prompts import Prompt, Prompts, as_prompts, labels_of
from perfmodel.record.routers import RouterWatch
from perfmodel.record.sampling import Sampling
from perfmodel.record.texts import check_prompts, kept_texts
from perfmodel.routing.npz import MAX_BYTES, shown
from perfmodel.routing.trace import RoutingTrace

WEIGHT_RULE = "as the experts are called with; picks from the largest weight to the smallest"
_PHASES = (
    "rows up to prompt_len: one call with the whole prompt; each later row: one call with one token, which was drawn"
    " from the logits before it; the last token drawn is fed too"
)


def record_trace(
    model: str | Path,
    prompts: str | Path | Sequence[str | Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    download: bool = False,
    name: str | None = None,
    keep_text: bool = False,
    report: Report | None = None,
) -> RoutingTrace:
    """Record a Mixture-of-Experts model of Transformers while it reads prompts and goes on by itself.

    Every prompt is a sequence of its own, run alone: one call for the prompt, then one call for every token, with
    the model's own cache. Hooks before the experts see what they are called with; the logits are the same bits with
    and without them. Every token has a row, the last one drawn among them, so a sequence of N new tokens has N decode
    rows; a server that does not run its last token has one fewer.

    Parameters
    ----------
    model : folder of a checkpoint (config.json, safetensors, tokenizer.json), or its id in the local Hugging Face cache
    prompts : a file, see `perfmodel.record.prompts.read_prompts`; or texts and `Prompt` objects
    max_new_tokens : tokens that are drawn for every prompt, at most; from 0, which records prompts alone
    temperature, top_p, top_k, seed : how they are drawn, see `perfmodel.record.sampling.Sampling`
    ignore_eos : never draw a mark of the end, so that every sequence has all new tokens
    dtype : number format that the model is run in, whatever its weights are stored in: float32, bfloat16 or float16
    device : cpu, cuda, cuda:N or mps; the whole model lies there
    download : fetch the files of an id that are missing here; otherwise nothing is looked up elsewhere
    name : of the model, in place of its id or of its folder's name
    keep_text : keep prompts and answers as text in the metadata (``texts``); answers that do not fit beside the prompts
        are cut, and ``texts_cut`` counts them
    report : told about the progress, in tokens

    Same inputs, library versions, device and number of threads: the same trace. Nothing is ever run that comes with a
    checkpoint, but for chat templates, in a sandbox.

    Raises
    ------
    PerfModelError : for bad values and prompts, for prompts to keep that are longer than the metadata may be, for a
        sequence longer than the model reads, where PyTorch or Transformers is missing
    ModelConfigError : for a checkpoint that cannot be loaded, or whose experts are called in another way

    Example::

        trace = record_trace("checkpoint", ["Once upon a time"], max_new_tokens=64, temperature=0.8)
        trace.save("story.npz")
    """
    check_report("report", report)
    new_tokens = at_least(max_new_tokens, 0, "max_new_tokens")
    sampling = Sampling(temperature, top_p, top_k, seed)
    for option, value in (("ignore_eos", ignore_eos), ("download", download), ("keep_text", keep_text)):
        flag(value, option)
    if name is not None:
        _check_name(name)
    check_dtype(dtype)
    given = as_prompts(prompts)
    transformers, torch = import_transformers(), import_torch()
    check_device(device, torch)
    found = find_checkpoint(model, download=download)
    shape = outline(found.folder, expert_blocks)
    reader = Reader(found.folder, shape.vocab_size)
    ids = reader.encode(given.items, _longest_prompt(shape, new_tokens))
    _check_size(ids, new_tokens, shape)
    asked = [reader.decode(prompt) for prompt in ids] if keep_text else []
    check_prompts(asked)
    with quiet(transformers):
        loaded = place(load_model(found.folder, dtype), device)
        sequences = run_prompts(loaded, ids, new_tokens, sampling, ignore_eos=ignore_eos, report=report)
    metadata: dict[str, Any] = {
        "model": found.name if name is None else name,
        "source": "recorded",
        "how": f"perfmodel trace record: torch {torch.__version__}, transformers {transformers.__version__}",
        "family": shape.family,
        "id_space": "logical",
        "weight_rule": WEIGHT_RULE,
        "phases": _PHASES,
        "dtype": dtype,
        "device": device,
        "sampling": sampling.plain(),
        "max_new_tokens": new_tokens,
        "ignore_eos": bool(ignore_eos),
        "ended": sum(one.ended for one in sequences),
    }
    if found.revision is not None:
        metadata["revision"] = found.revision
    if given.name is not None:
        metadata["prompts"] = {"name": given.name, "sha256": given.sha256}
    if keep_text:
        answers = [reader.decode(one.tokens[one.prompt_len :]) for one in sequences]
        metadata |= kept_texts(asked, answers)
    return _trace(sequences, shape, metadata, given)


def run_prompts(
    model: Any,
    prompts: Sequence[NDArray[np.int64]],
    new_tokens: int,
    sampling: Sampling,
    *,
    ignore_eos: bool = False,
    report: Report | None = None,
) -> list[Generation]:
    """Every prompt run on a loaded model, one after another; see `record_trace`.

    Hooks are gone when this returns, whatever happens.
    """
    marks = marks_of_end(model)
    total, done = sum(len(prompt) + new_tokens for prompt in prompts), 0

    def told(rows: int) -> None:
        nonlocal done
        done += rows
        if report is not None:
            report(done, total)

    sequences = []
    with RouterWatch(model) as watch:
        generator = Generator(
            model, watch, sampling, ends=() if ignore_eos else marks, never=marks if ignore_eos else ()
        )
        for number, prompt in enumerate(prompts):
            one = generator.run(prompt, new_tokens, number, told)
            sequences.append(one)
            if missing := len(prompt) + new_tokens - len(one.tokens):  # it ended before
                told(missing)
    return sequences


def _trace(sequences: list[Generation], shape: Outline, metadata: dict[str, Any], prompts: Prompts) -> RoutingTrace:
    return RoutingTrace(
        topk_ids=np.concatenate([one.ids for one in sequences]),
        topk_weights=np.concatenate([one.weights for one in sequences]),
        sequence_offsets=np.cumsum([0, *(len(one.tokens) for one in sequences)]),
        prompt_len=np.array([one.prompt_len for one in sequences]),
        layer_index=np.array(shape.layers),
        num_experts=shape.num_experts,
        metadata=metadata,
        labels=labels_of(prompts),
    )


def _longest_prompt(shape: Outline, new_tokens: int) -> int | None:
    if shape.positions is None:
        return None
    if new_tokens >= shape.positions:
        raise PerfModelError(
            f"max_new_tokens: found {new_tokens}, allowed: 0 to {shape.positions - 1} for this model, which reads"
            f" {shape.positions} tokens at once"
        )
    return shape.positions - new_tokens


def _check_size(prompts: Sequence[NDArray[np.int64]], new_tokens: int, shape: Outline) -> None:
    """Refuse what would not fit in one trace before anything runs; at least one pick a row counts."""
    rows = sum(len(prompt) + new_tokens for prompt in prompts)
    least = rows * len(shape.layers) * (np.dtype(np.uint16).itemsize + np.dtype(np.float32).itemsize)
    if least > MAX_BYTES:
        raise PerfModelError(
            f"prompts and max_new_tokens: {rows} tokens in {len(shape.layers)} layers take {least / 2**30:.1f} GiB or"
            f" more; allowed: {MAX_BYTES / 2**30:.0f} GiB"
        )


def _check_name(name: str) -> None:
    found: object = name
    if not isinstance(found, str) or not found.strip() or not found.isprintable() or len(found) > 200:
        raise PerfModelError(f"name: found {shown(name)}, allowed: a line of at most 200 letters")
