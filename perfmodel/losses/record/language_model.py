"""How well a checkpoint predicts text when its experts are quantised."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.bitwidth.checks import WIDEST
from perfmodel.errors import PerfModelError, PolicyError
from perfmodel.losses.calibration import Calibration
from perfmodel.losses.checkpoint import Checkpoint, Expert
from perfmodel.losses.expert import LEAST_ROWS, Rounding, gptq_expert, nearest_expert
from perfmodel.losses.gptq import Damping, Order
from perfmodel.losses.options import METHODS, Method
from perfmodel.record.blocks import load_model, moe_blocks, outline
from perfmodel.record.libraries import import_torch
from perfmodel.record.text import SEQUENCE, batches, check_sequence, cut, read_texts
from perfmodel.routing.npz import shown

#: ``quantise(layer, expert, weights, bits)`` gives the weights as they are after quantisation. ``layer`` counts the
#: layers with experts from 0, as the axes of loss tables and calibration files do.
Quantise = Callable[[int, int, Expert, int], Expert]


def quantiser(
    method: Method,
    calibration: Calibration | None = None,
    *,
    group: int | None = None,
    damping: Damping = "auto",
    order: Order = "natural",
) -> Quantise:
    """What `QuantisedModel` takes, by the name of a method as in ``perfmodel losses build``.

    method : ``"rtn"``, rounding to nearest; or ``"gptq"``, every expert by the calibration rows that it was given. As
        in a table, an expert that fewer than ``LEAST_ROWS`` of them reach is quantised by all rows of its layer.
    calibration : for ``"gptq"``; rows of other text than the loss is measured on
    group, damping, order : see `perfmodel.losses.gptq`

    Raises PerfModelError for another method, and for GPTQ without rows.
    """
    if method not in METHODS:
        raise PerfModelError(f"method: found {shown(method)}, allowed: {', '.join(METHODS)}")
    if method == "rtn":
        return lambda layer, expert, weights, bits: nearest_expert(weights, bits, group)
    if calibration is None:
        raise PerfModelError("method gptq needs calibration rows: give a calibration file, or method rtn")
    given = calibration

    def by_gptq(layer: int, expert: int, weights: Expert, bits: int) -> Expert:
        rows = given.rows(layer, expert)
        if len(rows) < LEAST_ROWS:
            rows = given.rows(layer)
        return gptq_expert(weights, rows, bits, Rounding((bits,), group, damping, order))

    return by_gptq


class QuantisedModel:
    """A checkpoint whose experts can be replaced by their quantised selves, and its loss on text.

    The checkpoint is loaded once and every quantised expert is made once, so that comparing many assignments costs
    one pass over the text each. Memory: the model, and a float32 copy of each expert at each width that was used.

    checkpoint : folder with config.json, safetensors and tokenizer.json
    quantise : what makes the quantised weights; see `quantiser`
    dtype : number format that the model is run in; weights are rounded to it after they are quantised

    Example::

        model = QuantisedModel("checkpoint", quantiser("rtn"))
        windows = model.windows(["held-out.txt"], tokens=65536)
        model.loss(windows), model.loss(windows, np.full((32, 8), 2))

    Raises
    ------
    ModelConfigError : a checkpoint that cannot be loaded, or whose experts are not understood
    PerfModelError : PyTorch or Transformers is not installed
    """

    def __init__(self, checkpoint: str | Path, quantise: Quantise, *, dtype: str = "float32") -> None:
        self.files = Checkpoint(checkpoint)
        self.outline = outline(checkpoint)
        self.quantise = quantise
        self._model = load_model(checkpoint, dtype)
        self._blocks = moe_blocks(self._model)
        self._bits = np.zeros((self.num_layers, self.num_experts), np.int64)
        self._made: dict[tuple[int, int, int], list[NDArray[np.float32]]] = {}

    @property
    def num_layers(self) -> int:
        """Layers with experts [1]."""
        return len(self.outline.layers)

    @property
    def num_experts(self) -> int:
        """Experts of a layer [1]."""
        return self.outline.num_experts

    def windows(
        self, files: Sequence[str | Path], *, tokens: int | None = None, sequence: int = SEQUENCE
    ) -> list[NDArray[np.int64]]:
        """Token ids of text files in windows of ``sequence`` tokens, at most ``tokens`` in all; see `text.cut`."""
        check_sequence(sequence, self.outline.positions)
        return cut(read_texts(self.files.folder, files, self.outline.vocab_size), sequence, tokens)

    def loss(self, windows: Sequence[NDArray[np.int64]], assignment: ArrayLike | None = None) -> float:
        """Cross-entropy [nat/token] over all windows, with every expert at its assigned width.

        The mean of ``-ln p(token | the tokens before it in its window)`` over every token but the first of each
        window, in an order that does not depend on the assignment.

        assignment : whole numbers [layers, experts], the bits of every expert; 0 is the checkpoint's own
            precision, and so is None for all

        Raises PolicyError for an assignment of another shape or with other numbers, and whatever the quantiser
        raises.
        """
        if not len(windows):
            raise PerfModelError("windows: found none, allowed: one or more")
        torch = import_torch()
        self._apply(self._checked(assignment))
        total, scored = 0.0, 0
        with torch.inference_mode():
            for batch in batches(windows):
                ids = torch.from_numpy(batch)
                logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                terms = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
                total += float(terms.double().sum())
                scored += terms.numel()
        return total / scored

    def _checked(self, assignment: ArrayLike | None) -> NDArray[np.int64]:
        shape = (self.num_layers, self.num_experts)
        if assignment is None:
            return np.zeros(shape, np.int64)
        bits = np.asarray(assignment)
        if bits.shape != shape or bits.dtype.kind not in "iu":
            raise PolicyError(
                f"assignment: found {bits.dtype} {list(bits.shape)}, allowed: whole numbers {list(shape)}"
            )
        wrong = bits[(bits < 0) | (bits > WIDEST)]
        if wrong.size:
            raise PolicyError(f"assignment: found {wrong[0]} bits, allowed: 0 (not quantised) to {WIDEST}")
        return bits.astype(np.int64)

    def _apply(self, bits: NDArray[np.int64]) -> None:
        for layer, expert in np.argwhere(bits != self._bits).tolist():
            width = int(bits[layer, expert])
            self._put(layer, expert, *self._weights(layer, expert, width))
            self._bits[layer, expert] = width

    def _weights(self, layer: int, expert: int, bits: int) -> list[NDArray[np.float32]]:
        """One expert at some bits; its own weights are read anew, since the model's copy may be replaced."""
        key = (layer, expert, bits)
        if key in self._made:
            return self._made[key]
        own = self.files.expert(layer, expert)
        if not bits:
            return [matrix.astype(np.float32) for matrix in own]
        self._made[key] = [matrix.astype(np.float32) for matrix in self.quantise(layer, expert, own, bits)]
        return self._made[key]

    def _put(
        self,
        layer: int,
        expert: int,
        gate: NDArray[np.float32],
        up: NDArray[np.float32],
        down: NDArray[np.float32],
    ) -> None:
        torch = import_torch()
        experts = self._blocks[layer].experts
        with torch.inference_mode():
            experts.gate_up_proj[expert].copy_(torch.from_numpy(np.concatenate([gate, up])))
            experts.down_proj[expert].copy_(torch.from_numpy(down))
