"""Watching the routers of a model: what the experts of every layer are called with."""

from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import ModelConfigError
from perfmodel.record.blocks import MoEBlock, expert_blocks, family_of


def _joined(parts: list[Any], torch: Any) -> Any:
    """What one layer saw in one or more calls, [rows, k]."""
    flat = [one.reshape(-1, one.shape[-1]) for one in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


class RouterWatch:
    """Picks and weights of every row that a model's experts are given while the watch is open.

    Hooks before the experts look at what they are called with: rows, and for each row the ids of its experts and
    their weights. Nothing is changed, and no hook is left when the watch closes.

    model : a Transformers model whose experts are modules called so, see `perfmodel.record.blocks.expert_blocks`

    Raises :class:`ModelConfigError` for a model without such experts, and from `take` for calls that are not
    understood.
    """

    def __init__(self, model: Any) -> None:
        self.blocks = expert_blocks(model)
        self.num_experts = self.blocks[0].num_experts
        self.layers = tuple(block.layer for block in self.blocks)
        self._family = family_of(model)
        self._seen: list[list[tuple[Any, Any]]] = [[] for _ in self.blocks]
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for block, seen in zip(self.blocks, self._seen, strict=True):
            seen.clear()
            self._hooks.append(block.experts.register_forward_pre_hook(self._look(block, seen), with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self, block: MoEBlock, seen: list[tuple[Any, Any]]) -> Any:
        def look(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            # Beside the rows themselves there are ids, the only whole numbers, and weights of the same shape.
            others = (*positional[1:], *(value for name, value in named.items() if name != "hidden_states"))
            given = [one for one in others if hasattr(one, "dtype")]
            ids = [one for one in given if not one.is_floating_point()]
            weights = [one for one in given if one.is_floating_point()]
            fine = len(ids) == len(weights) == 1 and ids[0].shape == weights[0].shape and ids[0].ndim > 1
            if not fine or (seen and ids[0].shape[-1] != seen[0][0].shape[-1]):
                found = ", ".join(f"{one.dtype} {tuple(one.shape)}" for one in given) or "rows alone"
                raise self._strange(block, f"calls its experts with {found}, which is not understood")
            # Copies, since what runs later may write into either.
            seen.append((ids[0].detach().clone(), weights[0].detach().clone()))

        return look

    def take(self, rows: int) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        """What was seen since the last call, for as many rows as the model has read since.

        Returns ids and weights [rows, layers, k], the picks of a row from the largest weight to the smallest; equal
        weights stay in the model's order. Raises :class:`ModelConfigError` where a layer was given another number of
        rows, for ids that are no experts, and for weights that are not finite.
        """
        import torch  # a model is there, so this is

        ids, weights = [], []
        for block, seen in zip(self.blocks, self._seen, strict=True):
            if not seen:
                raise self._strange(block, f"has experts that were given nothing of {rows} rows")
            ids.append(_joined([one for one, _ in seen], torch))
            weights.append(_joined([one for _, one in seen], torch))
            seen.clear()
            found, top_k = ids[-1].shape
            if found != rows:
                raise self._strange(block, f"has experts that were given {found} rows of {rows}")
            if top_k != ids[0].shape[1]:
                raise self._strange(block, f"picks {top_k} experts a row, another layer {ids[0].shape[1]}")
        # One copy from the device for all layers; their parts may lie on several.
        device = ids[0].device
        picked = torch.stack([one.to(device) for one in ids], dim=1).cpu().numpy()
        given = torch.stack([one.to(device) for one in weights], dim=1).float().cpu().numpy()
        self._check(picked, given)
        order = np.argsort(-given, axis=-1, kind="stable")
        picked, given = (np.take_along_axis(one, order, axis=-1) for one in (picked, given))
        return picked.astype(np.uint16), given

    def _check(self, ids: NDArray[Any], weights: NDArray[np.float32]) -> None:
        wrong = (ids < 0) | (ids >= self.num_experts)
        if wrong.any():
            _, layer, _ = where = tuple(np.argwhere(wrong)[0])
            raise self._strange(self.blocks[layer], f"routes to expert {ids[where]}, but has {self.num_experts}")
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        if wrong.any():
            _, layer, _ = where = tuple(np.argwhere(wrong)[0])
            hint = "; try another dtype" if not np.isfinite(weights[where]) else ""
            raise self._strange(
                self.blocks[layer], f"weighs an expert with {weights[where]}, expected a finite number >= 0{hint}"
            )

    def _strange(self, block: MoEBlock, what: str) -> ModelConfigError:
        return ModelConfigError(f"model family {self._family}: layer {block.layer} {what}")
