"""Calibration rows: what the experts of a model are given when it reads text."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ModelConfigError, PerfModelError, TraceError
from perfmodel.losses.calibration import Calibration
from perfmodel.progress import Report, check_report
from perfmodel.record.blocks import MoEBlock, Outline, load_model, moe_blocks, outline
from perfmodel.record.libraries import import_torch, import_transformers
from perfmodel.record.options import at_least
from perfmodel.record.text import SEQUENCE, TOKENS, batches, check_sequence, cut, read_texts
from perfmodel.routing.npz import MAX_BYTES, npz_keys, one_line, read_npz, shown
from perfmodel.routing.places import check_place


def capture(
    checkpoint: str | Path,
    files: Sequence[str | Path],
    *,
    tokens: int = TOKENS,
    sequence: int = SEQUENCE,
    rows: int | None = None,
    seed: int = 0,
    dtype: str = "float32",
    output: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    report: Report | None = None,
) -> Calibration:
    """Run a checkpoint on text and keep what its experts are given.

    The rows are what the experts are called with, after the norm and the router, as float16, or as float32 where a
    value overflows it; the same tokens in every layer.

    checkpoint : folder with config.json, safetensors and tokenizer.json
    files : text, cut into windows of ``sequence`` tokens, in turn from every file up to ``tokens`` in all
    rows : tokens kept, drawn without replacement by ``seed``; None keeps all
    dtype : number format that the model is run in
    output : ``.npz`` file for the rows. One that was captured with the same settings is made again; with others only
        where ``overwrite`` is given; what is no calibration file is left alone.
    report : told about the progress

    The files are read and the sizes checked before the weights are loaded. Nothing is padded, so every row is a
    token of the text; the model's answers are not changed. Same inputs, library versions and number of threads:
    same rows. Raises :class:`PerfModelError` for bad inputs and values, and for an output that cannot be written or is
    left alone, and :class:`ModelConfigError` for a
    checkpoint that cannot be loaded or whose experts are not understood.
    """
    check_report("report", report)
    if not isinstance(overwrite, bool | np.bool_):
        raise PerfModelError(f"overwrite: found {shown(overwrite)}, allowed True or False")
    if overwrite and output is None:
        raise PerfModelError("overwrite: of no use without an output")
    there = None if output is None else _captured(check_place(output))
    at_least(seed, 0, "seed")
    shape = outline(checkpoint)
    check_sequence(sequence, shape.positions)
    texts = read_texts(checkpoint, files, shape.vocab_size)
    windows = cut(texts, sequence, tokens)
    total = sum(window.size for window in windows)
    wanted = total if rows is None else at_least(rows, 1, "rows")
    if wanted > total:
        raise PerfModelError(f"rows: found {wanted}, allowed: 1 to {total}, the tokens of the text")
    _check_size(wanted, shape)
    settings = {
        "checkpoint": Path(checkpoint).resolve().name,
        "family": shape.family,
        "experts": shape.num_experts,
        "texts": [{"name": text.name, "sha256": text.sha256} for text in texts],
        "tokens": total,
        "sequence": sequence,
        "rows": wanted,
        "seed": seed,
        "dtype": dtype,
    }
    if there is not None and not overwrite:
        _check_same(there, settings, output)
    model = load_model(checkpoint, dtype)
    kept = np.sort(np.random.default_rng(seed).choice(total, wanted, replace=False))
    recorders = [_Recorder(block, kept, shape) for block in moe_blocks(model)]
    _run(model, windows, recorders, report)
    torch, transformers = import_torch(), import_transformers()
    found = Calibration(
        hidden=_narrow(np.stack([one.hidden for one in recorders])),
        expert_ids=np.stack([one.ids for one in recorders]),
        expert_weights=np.stack([one.weights for one in recorders]),
        layer_index=np.array(shape.layers, np.int64),
        name=f"rows of {Path(checkpoint).resolve().name}",
        info={
            **settings,
            "how": f"torch {torch.__version__}, transformers {transformers.__version__}",
        },
    )
    if output is not None:
        found.save(check_place(output))
    return found


def _captured(file: Path) -> Mapping[str, Any] | None:
    """What a calibration file says of how it was made; None where no file is. Anything else is left alone."""
    if not file.exists():
        return None
    where = f"output {one_line(file)}"
    try:
        if {"hidden", "expert_ids"} <= set(npz_keys(file)):
            found = json.loads(str(read_npz(file, ["metadata"]).get("metadata", "{}")))
            return found if isinstance(found, dict) else {}
    except (TraceError, ValueError, RecursionError):
        pass
    raise PerfModelError(f"{where}: exists and is no calibration file; it is left alone, choose another output")


def _check_same(there: Mapping[str, Any], here: Mapping[str, Any], output: Any) -> None:
    if other := [name for name in here if there.get(name) != here[name]]:
        found = ", ".join(
            name if name == "texts" else f"{name} {shown(there.get(name))} there, {shown(here[name])} here"
            for name in other
        )
        raise PerfModelError(
            f"output {one_line(output)}: holds rows of something else ({one_line(found)}); choose another output, or"
            " replace it with --overwrite"
        )


class _Recorder:
    """Keeps the chosen rows of one block while the model runs.

    It looks at what the experts are called with, after routing, and changes nothing.
    """

    def __init__(self, block: MoEBlock, kept: NDArray[np.int64], shape: Outline) -> None:
        self.block = block
        self.hidden = np.empty((kept.size, shape.hidden_size), np.float32)
        self.ids = np.empty((0, 0), np.uint8)
        self.weights = np.empty((0, 0), np.float32)
        self.seen = 0
        self._kept = kept
        self._num_experts = shape.num_experts
        self._where = f"model family {shape.family}: layer {block.layer}"

    def look(self, _: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The hook before the experts run."""
        given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), positional, strict=False)) | named
        if not {"hidden_states", "top_k_index", "top_k_weights"} <= given.keys():
            raise ModelConfigError(f"{self._where} calls its experts with {sorted(given)}, which is not understood")
        hidden = given["hidden_states"].detach().float().reshape(-1, self.hidden.shape[1]).cpu().numpy()
        ids = given["top_k_index"].detach().cpu().numpy()
        weights = given["top_k_weights"].detach().float().cpu().numpy()
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or weights.shape != ids.shape or len(ids) != len(hidden):
            raise ModelConfigError(
                f"{self._where} routes with ids {ids.dtype} {ids.shape} and weights {weights.shape} for {len(hidden)}"
                " rows, which is not understood"
            )
        if ids.min() < 0 or ids.max() >= self._num_experts:
            raise ModelConfigError(f"{self._where} routes to expert {ids.max()}, but has {self._num_experts}")
        first, last = np.searchsorted(self._kept, (self.seen, self.seen + len(ids)))
        chosen = self._kept[first:last] - self.seen
        if not self.seen:
            top_k = ids.shape[1]
            self.ids = np.empty((self._kept.size, top_k), np.uint8 if self._num_experts <= 256 else np.uint16)
            self.weights = np.empty((self._kept.size, top_k), np.float32)
        self.hidden[first:last] = hidden[chosen]
        if not np.isfinite(self.hidden[first:last]).all():
            raise ModelConfigError(f"{self._where} is given rows that are not finite; try another dtype")
        self.ids[first:last], self.weights[first:last] = ids[chosen], weights[chosen]
        self.seen += len(ids)


def _run(model: Any, windows: list[NDArray[np.int64]], recorders: list[_Recorder], report: Report | None) -> None:
    torch = import_torch()
    total, done = sum(window.size for window in windows), 0
    hooks = [one.block.experts.register_forward_pre_hook(one.look, with_kwargs=True) for one in recorders]
    try:
        with torch.inference_mode():
            for batch in batches(windows):
                model.base_model(input_ids=torch.from_numpy(batch), use_cache=False)
                done += batch.size
                if report is not None:
                    report(done, total)
    finally:
        for hook in hooks:
            hook.remove()
    for one in recorders:
        if one.seen != total:
            raise ModelConfigError(
                f"model layer {one.block.layer}: its experts were given {one.seen} rows of {total} tokens"
            )


def _narrow(hidden: NDArray[np.float32]) -> NDArray[Any]:
    """Half the bytes where every value fits."""
    largest = max(float(hidden.max()), -float(hidden.min()))
    return hidden.astype(np.float16) if largest <= float(np.finfo(np.float16).max) else hidden


def _check_size(rows: int, shape: Outline) -> None:
    row = len(shape.layers) * shape.hidden_size * np.dtype(np.float32).itemsize
    if rows * row > MAX_BYTES:
        raise PerfModelError(
            f"rows: found {rows}, {rows * row / 2**30:.1f} GiB of hidden states in float32; allowed: 1 to"
            f" {MAX_BYTES // row} for this checkpoint, {MAX_BYTES / 2**30:.0f} GiB"
        )
