"""What a bit budget should make small: the published plain sum of losses, or a weighted one."""

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.bitwidth.checks import check_memory, choice, common_lead, finite, menu, not_negative, per_expert
from perfmodel.bitwidth.problem import check_shapes
from perfmodel.bitwidth.table import BITS
from perfmodel.errors import PolicyError

Objective = Literal["plain", "importance", "use", "variance"]
OBJECTIVES: tuple[Objective, ...] = ("plain", "importance", "use", "variance")


def objective_weights(
    objective: Objective,
    importance: ArrayLike | None = None,
    use: ArrayLike | None = None,
    output_variance: ArrayLike | None = None,
) -> NDArray[np.float64] | None:
    """Factor of every expert's loss under an objective, for ``weights=`` of the selector [..., E].

    - ``plain``: none, the sum that the paper states;
    - ``importance``: the importance that also orders the experts;
    - ``use``: how often each expert is expected to be picked, so that the sum is the loss of all picks;
    - ``variance``: one over the mean square of the unquantised output, so that a loss counts as a share of it. An
      expert without output counts nothing.

    Raises PolicyError for another objective, and when what it needs is not given, not finite or negative.

    >>> objective_weights("variance", output_variance=[4.0, 0.5]).tolist()
    [0.25, 2.0]
    """
    choice("objective", objective, OBJECTIVES)
    if objective == "plain":
        return None
    given: dict[str, tuple[str, Any]] = {
        "importance": ("importance", importance),
        "use": ("use", use),
        "variance": ("output_variance", output_variance),
    }
    name, values = given[objective]
    if values is None:
        raise PolicyError(f"objective {objective!r} needs {name}, and none is given")
    array = finite(values, name, PolicyError)
    not_negative(array, name, PolicyError)
    if objective != "variance":
        return array
    # One over a smaller number than this would be infinite.
    measurable = array >= np.finfo(np.float64).tiny
    return np.asarray(np.divide(1.0, array, out=np.zeros_like(array), where=measurable))


def assigned_loss(
    losses: ArrayLike, assigned: ArrayLike, *, bits: ArrayLike = BITS, weights: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Summed loss of an assignment over the experts of each layer [...].

    Parameters
    ----------
    losses : finite numbers, not negative [..., E, widths]. Leading axes of all arrays broadcast.
    assigned : bit width of every expert [..., E]
    bits : the widths of the last axis of ``losses``, rising [bit]
    weights : factors of the losses, finite and not negative [..., E]

    Raises PolicyError when shapes do not match, a number is out of range, or a width is not one of ``bits``.

    >>> assigned_loss([[2, 1.5, 1, 0.5], [8, 4, 2, 1]], [1, 3]).tolist()
    4.0
    """
    widths = menu(bits, "bits", PolicyError)
    loss = finite(losses, "losses", PolicyError)
    check_shapes(loss, None, len(widths))
    not_negative(loss, "losses", PolicyError)
    num_experts = loss.shape[-2]
    given = {"losses": loss, "assigned": per_expert(assigned, "assigned", num_experts)}
    if weights is not None:
        given["weights"] = per_expert(weights, "weights", num_experts)
        not_negative(given["weights"], "weights", PolicyError)
    shape = (*common_lead(given), num_experts)
    check_memory(shape, loss.itemsize)
    level = np.broadcast_to(_levels(given["assigned"], widths), shape)
    table = np.broadcast_to(loss, (*shape, len(widths)))
    taken = np.take_along_axis(table, level[..., None], axis=-1)[..., 0]
    with np.errstate(over="ignore"):
        total = np.asarray((taken if weights is None else taken * given["weights"]).sum(axis=-1))
    if np.isinf(total).any():
        raise PolicyError("losses add up to more than a float64 holds; give them in a larger unit")
    return total


def _levels(assigned: NDArray[np.float64], widths: tuple[int, ...]) -> NDArray[np.int64]:
    level = np.minimum(np.searchsorted(widths, assigned), len(widths) - 1)
    bad = np.array(widths)[level] != assigned
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        listed = ", ".join(map(str, widths))
        raise PolicyError(f"assigned{list(where)} is {assigned[where]:g}; the losses are those of {listed} bits")
    return level
