"""Loss tables from the weights of a checkpoint."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel import __version__
from perfmodel.bitwidth import BITS, LossTable
from perfmodel.errors import PerfModelError
from perfmodel.losses.calibration import Calibration
from perfmodel.losses.checkpoint import Checkpoint
from perfmodel.losses.expert import LEAST_ROWS, LEAST_ROWS_A_FOLD, ExpertLosses, gptq_losses, nearest_losses
from perfmodel.losses.gptq import Damping, Order
from perfmodel.losses.grids import scale_bits_per_weight
from perfmodel.losses.journal import Partial, differences, made_from, program_hash, write_npz
from perfmodel.losses.options import BuildOptions, Method, checked
from perfmodel.losses.outputs import MARK, check_output, partial_file
from perfmodel.model import MoEModel
from perfmodel.progress import Report, check_report
from perfmodel.routing.npz import one_line, shown

#: Largest matrix of an expert that threads do not pay for [weights].
_SMALL = 2**20


def build_losses(
    checkpoint: str | os.PathLike[str],
    calibration: str | os.PathLike[str] | Calibration,
    output: str | os.PathLike[str] | None = None,
    *,
    held_out: str | os.PathLike[str] | Calibration | None = None,
    method: Method = "gptq",
    bits: Iterable[int] = BITS,
    group_size: int | None = None,
    damping: Damping | None = None,
    order: Order | None = None,
    folds: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
) -> LossTable:
    """How much worse every expert of a checkpoint gets at every bit width, measured on rows that were held out.

    Every expert is quantised on its own and compared with itself in full precision, on the rows that the router sends
    it: the loss is the mean square of the difference of the outputs, over rows and hidden units, before the router's
    weight. An expert that fewer rows reach than two a fold, and eight in all, is given all rows of its layer.

    One expert is in memory at a time. The same inputs under the same names give the same bytes with the same libraries
    and processor, however often the build was stopped and resumed; with matrices of more than 2^20 weights, with the
    same number of threads. Names of the model and of the rows are kept in the metadata and decide nothing else.

    Parameters
    ----------
    checkpoint : folder with ``config.json`` and safetensors files, see `Checkpoint`
    calibration : rows that go into the experts, a file or a `Calibration`
    output : ``.npz`` file for the table; what is done is kept beside it until it is finished
    held_out : other rows; the weights are then quantised once, by all rows of ``calibration``, and the losses measured
        on these. Without, every row of ``calibration`` is held out once.
    method : ``"gptq"`` [1], or ``"rtn"`` for rounding to nearest, which no row has a say in
    bits : widths, rising, 1 to 16 [bit]; 1 bit is the sign times one magnitude
    group_size : columns that share a scale, 2 or more; all columns of a row by default
    damping : what is added to the diagonal of the second moment of the inputs, as a share of its mean, above 0. By
        default (``"auto"``) what Ledoit and Wolf estimate from the rows [2], and 0.01 at least.
    order : in which the columns are rounded: ``"natural"`` (default), or ``"activation"``, the largest inputs first
    folds : parts that the rows of an expert are dealt into, 2 or more; every part is held out once (default 4)
    resume : go on with an unfinished build, whose experts must still have the weights that they had
    overwrite : throw an unfinished build away, and replace a finished table. Without, a finished table of the same
        inputs and options is the result, whatever unfinished build lies beside it, and one of others is an error; what
        perfmodel did not build is never replaced.
    report : called with the experts that are done, and the experts of all layers

    Returns
    -------
    LossTable : with ``output_variance``, ``n_tokens`` and, as ``info``, how it was made

    Raises
    ------
    ModelConfigError : the config is missing, or describes no experts that are understood
    TraceError : the rows are damaged, or of another model
    PerfModelError : weights are missing or damaged; an option is not allowed; the output cannot be written, or an
        unfinished build, a table of something else or another kind of file is there

    References
    ----------
    .. [1] Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
       arXiv:2210.17323, 2022.
    .. [2] Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", Journal of
       Multivariate Analysis 88 (2004), 365-411.
    """
    for name, flag in (("resume", resume), ("overwrite", overwrite)):
        if not isinstance(flag, bool | np.bool_):
            raise PerfModelError(f"{name}: found {shown(flag)}, allowed True or False")
    if resume and overwrite:
        raise PerfModelError("resume and overwrite exclude each other; give one of them")
    check_report("report", report)
    if output is None and (resume or overwrite):
        raise PerfModelError(f"{'resume' if resume else 'overwrite'}: of no use without an output")
    inputs = tuple(Path(one) for one in (calibration, held_out) if isinstance(one, str | os.PathLike))
    target = None if output is None else check_output(output, inputs)
    weights = Checkpoint(checkpoint)
    chosen = checked(
        method=method, bits=bits, group_size=group_size, damping=damping, order=order, folds=folds,
        has_held_out=held_out is not None, widest=max(weights.model.hidden_size, weights.model.expert_size),
    )  # fmt: skip
    rows = _rows("calibration", calibration, weights)
    other = None if held_out is None else _rows("held-out rows", held_out, weights)
    work = _Work(weights, rows, other, chosen)
    say = report or (lambda done, total: None)
    if target is not None and target.exists() and not overwrite:
        finished = work.finished(target)
        if isinstance(finished, LossTable):
            say(finished.losses[..., 0].size, finished.losses[..., 0].size)
            return finished
        if not os.path.lexists(partial_file(target)):
            raise PerfModelError(finished)
    partial = Partial(target, work.identity(), work.shape, work.measured_rows(), resume=resume, overwrite=overwrite)
    partial.check_weights(weights.expert_hash)
    try:
        with _enough_threads(weights.model):
            for layer, expert in np.argwhere(~partial.done).tolist():
                say(int(partial.done.sum()), partial.done.size)
                partial.record(layer, expert, *work.losses(layer, expert))
        say(partial.done.size, partial.done.size)
    except PerfModelError as error:
        raise type(error)(f"{error}{partial.kept()}") from None
    finally:
        partial.flush()
    info = work.described(partial.weights_hash())
    # Made before anything is written or removed, because it checks what goes into the file.
    table = LossTable(
        partial.arrays["losses"],
        name=weights.name if target is None else target.stem,
        source="measured",
        bits=chosen.bits,
        output_variance=partial.arrays["output_variance"],
        n_tokens=partial.arrays["rows"],
        info=info,
    )
    if target is not None:
        write_npz(target, _arrays(partial.arrays, chosen, info))
        partial.discard()
    return table


@contextlib.contextmanager
def _enough_threads(model: MoEModel) -> Iterator[None]:
    """Linear algebra on one thread where matrices are small.

    Threads would there wait for each other longer than they work, many times so on a busy machine. And results would
    depend on their number, in the last bits.
    """
    import scipy.linalg.lapack  # brings a library of its own, which has to be there to be told  # noqa: F401
    from threadpoolctl import threadpool_limits

    small = model.hidden_size * model.expert_size <= _SMALL
    with threadpool_limits(1 if small else None, user_api="blas"):
        yield


class _Work:
    """What has to be done for every expert, and what the result depends on."""

    def __init__(
        self, weights: Checkpoint, calibration: Calibration, held_out: Calibration | None, options: BuildOptions
    ) -> None:
        self.weights, self.calibration, self.held_out, self.options = weights, calibration, held_out, options
        if held_out is not None and held_out.content_hash() == calibration.content_hash():
            raise PerfModelError(
                "held-out rows: those of the calibration itself; allowed: other rows, or none, to hold every row"
                " of the calibration out once"
            )
        self._least = max(LEAST_ROWS, LEAST_ROWS_A_FOLD * (options.folds or 1))
        for rows in (calibration, held_out):
            if rows is not None and rows.num_rows < LEAST_ROWS:
                raise PerfModelError(f"{rows.name}: {rows.num_rows} rows of a layer; allowed: {LEAST_ROWS} or more")
        if calibration.num_rows < self._least:
            raise PerfModelError(
                f"folds: found {options.folds}; allowed: 2 to {calibration.num_rows // LEAST_ROWS_A_FOLD}, as"
                f" {calibration.name} has {calibration.num_rows} rows of a layer and every fold needs"
                f" {LEAST_ROWS_A_FOLD}"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts, widths."""
        model = self.weights.model
        return model.num_moe_layers, model.num_experts, len(self.options.bits)

    def losses(self, layer: int, expert: int) -> tuple[ExpertLosses, bool, bytes]:
        """The numbers of one expert, whether it got rows that the router sent elsewhere, and its weights' hash."""
        seen, few = self._rows_of(self.calibration, layer, expert)
        unseen, fewer = (None, False) if self.held_out is None else self._rows_of(self.held_out, layer, expert)
        (weights, digest), options = self.weights.hashed_expert(layer, expert), self.options
        where = f"model {shown(self.weights.name)}: expert {expert} of layer {self.weights.model.moe_layers[layer]}"
        try:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
                if options.method == "rtn":
                    measured = seen if unseen is None else unseen
                    few, fewer = (few, False) if unseen is None else (fewer, False)
                    found = nearest_losses(weights, measured, options.bits, options.group_size)
                else:
                    found = gptq_losses(weights, seen, unseen, options.rounding, options.folds or 1)
        except np.linalg.LinAlgError:
            raise PerfModelError(
                f"{where}: damping {options.damping} leaves the second moment of its {len(seen)} rows singular;"
                " allowed: more damping, or auto"
            ) from None
        if not np.isfinite([*found.losses, *found.nearest, found.output_variance]).all():
            raise PerfModelError(f"{where}: its output is too large for a number; allowed: weights of usual size")
        return found, few or fewer, digest

    def _rows_of(self, source: Calibration, layer: int, expert: int) -> tuple[NDArray[np.float64], bool]:
        own = source.rows(layer, expert)
        return (own, False) if len(own) >= self._least else (source.rows(layer), True)

    def hashes(self) -> dict[str, str]:
        """Contents of whatever the numbers depend on, but for the weights, which are hashed as they are read."""
        rows = {"calibration": self.calibration, "held_out": self.held_out}
        return {
            "program": program_hash(),
            **{name: one.content_hash() for name, one in rows.items() if one is not None},
        }

    def identity(self) -> dict[str, Any]:
        """Everything that the numbers depend on, but for the weights."""
        return {**self.options.described(), "bits": list(self.options.bits), **self.hashes()}

    def measured_rows(self) -> NDArray[np.int64]:
        """How many rows every expert is measured on [layers, experts]."""
        source = self.calibration if self.held_out is None else self.held_out
        experts = self.weights.model.num_experts
        own = [np.bincount(ids.astype(np.int64).ravel(), minlength=experts) for ids in source.expert_ids]
        return np.where(np.array(own) >= self._least, own, source.num_rows).astype(np.int64)

    def finished(self, target: Path) -> LossTable | str:
        """The table that is there, if it is of these inputs and options; every weight is read for that.

        In its place a message where it cannot be read or is of others.
        """
        try:
            done = LossTable.load(target)
        except PerfModelError as error:
            return f"{one_line(error)}; choose another output, or replace it with --overwrite"
        there = made_from(done)
        weights = there.pop("checkpoint", None)
        other = differences(there, self.identity())
        if not other:
            digest = hashlib.sha256()
            for layer, expert in np.ndindex(*self.shape[:2]):
                digest.update(self.weights.expert_hash(layer, expert))
            if digest.hexdigest() == weights:
                return done
            other = "the contents of checkpoint changed"
        return (
            f"{one_line(target)}: is a finished table of something else ({other}); choose another output, or replace it"
            " with --overwrite"
        )

    def described(self, weights: str) -> dict[str, Any]:
        """How the table is made, as plain values without times and places, so that the same table is the same file.

        weights : hash of the weights of all experts
        """
        model, group = self.weights.model, self.options.group_size
        shapes = [(model.expert_size, model.hidden_size)] * 2 + [(model.hidden_size, model.expert_size)]
        names = {"calibration": self.calibration, "held_out": self.held_out}
        return {
            MARK: __version__,
            "model": self.weights.name,
            "model_type": model.family,
            "num_layers": model.num_layers,
            "num_experts": model.num_experts,
            "top_k": model.top_k,
            "hidden_size": model.hidden_size,
            "expert_size": model.expert_size,
            **self.options.described(),
            "scale_bits_per_weight": [scale_bits_per_weight(shapes, width, group) for width in self.options.bits],
            "least_rows": self._least,
            **{name: Path(one.name).name for name, one in names.items() if one is not None},
            "sha256": {"checkpoint": weights, **self.hashes()},
        }


def _rows(what: str, given: Any, weights: Checkpoint) -> Calibration:
    if not isinstance(given, str | os.PathLike | Calibration):
        raise PerfModelError(f"{what}: found {shown(given)}; allowed: a calibration file (.npz)")
    if not isinstance(given, Calibration):
        return Calibration.load(given, weights.model)
    given.check_model(weights.model)
    return given


def _arrays(found: dict[str, NDArray[Any]], options: BuildOptions, info: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """What the file of a finished table holds."""
    return {
        "losses": found["losses"],
        "bits": np.array(options.bits, dtype=np.int64),
        "output_variance": found["output_variance"],
        "n_tokens": found["rows"],
        "borrowed": found["borrowed"],
        **({} if options.method == "rtn" else {"losses_rtn": found["nearest"]}),
        "metadata": np.array(json.dumps(info)),
    }
