"""The feed-forward network of a layer."""

from dataclasses import dataclass

from perfmodel.errors import ModelConfigError
from perfmodel.families import Experts, Tensor, Tensors
from perfmodel.model.gguf.layers import Layer
from perfmodel.model.gguf.metadata import Metadata
from perfmodel.model.gguf.names import EXPERT_ORDER, SUFFIXES


@dataclass(frozen=True, slots=True)
class Network:
    """A layer's feed-forward network, with the fields of `perfmodel.model.FeedForward`."""

    norm_params: int
    dense: Tensors = ()
    shared: Tensors = ()
    router: Tensors = ()
    experts: Experts | None = None

    @property
    def name(self) -> str:
        if self.experts is not None:
            return "moe"
        return "dense" if self.dense else "none"


class FeedForwardReader:
    """Reads the feed-forward networks of a model's layers.

    notes : sentences on what the tensors say other than the metadata.
    """

    def __init__(self, metadata: Metadata, hidden: int, num_layers: int) -> None:
        self.metadata, self.hidden = metadata, hidden
        self.top_k = metadata.sizes("expert_used_count", num_layers, default=[0] * num_layers)
        self.notes: list[str] = []

    def read(self, index: int, layer: Layer) -> Network:
        """The network of one layer.

        Raises
        ------
        ModelConfigError : its tensors do not fit each other or the metadata.
        """
        return Network(
            norm_params=layer.norm_params("feed_forward_norm"),
            dense=tuple(layer.part("dense").values()),
            shared=tuple(layer.part("shared").values()),
            router=tuple(layer.part("router").values()),
            experts=self._experts(index, layer) if layer.experts else None,
        )

    def _error(self, index: int, found: str, allowed: str) -> ModelConfigError:
        return ModelConfigError(f"{self.metadata.where}: layer {index} {found}; allowed: {allowed}")

    def _experts(self, index: int, layer: Layer) -> Experts:
        found = layer.experts
        order = [name + suffix for name in EXPERT_ORDER for suffix in SUFFIXES if name + suffix in found]
        counts = {name: found[name][1] for name in order}
        count = counts[order[0]]
        for name, other in counts.items():
            if other != count:
                raise self._error(index, f"has {other} experts in {name}", f"{count}, as {order[0]} has")
        router = layer.part("router").get("ffn_gate_inp")
        if router is None or router.shape[-1] * count != router.params:
            shape = "no ffn_gate_inp" if router is None else f"an ffn_gate_inp of shape {router.shape}"
            raise self._error(index, f"has {shape}", f"a router to {count} experts")
        self._note_count(count)
        width = self._width(index, layer)
        return Experts(
            count=count,
            top_k=self._top_k(index, count),
            size=width,
            tensors=tuple(found[name][0] for name in order),
        )

    def _note_count(self, count: int) -> None:
        stated = self.metadata.get("expert_count")
        if stated != count:
            said = f"{self.metadata.key('expert_count')} is {stated}"
            note = f"layers have {count} experts by their tensors, where {said}"
            if note not in self.notes:
                self.notes.append(note)

    def _width(self, index: int, layer: Layer) -> int:
        """The inner width of an expert, through which its matrices must fit each other."""
        matrices = {name: layer.experts[name][0] for name in EXPERT_ORDER if name in layer.experts}
        down = matrices.get("ffn_down_exps")
        if down is None or not ("ffn_gate_up_exps" in matrices) ^ ("ffn_up_exps" in matrices):
            raise self._error(index, f"has experts of {', '.join(matrices)}", "matrices up (or gate and up) and down")
        latent = layer.part("dense").get("ffn_latent_down")
        outside = self.hidden if latent is None else latent.shape[0]
        width = down.shape[-1]
        for name, tensor in matrices.items():
            if name == "ffn_down_exps":
                fits = (outside, width)
            else:
                fits = (2 * width if name == "ffn_gate_up_exps" else width, outside)
            if tensor.shape != fits:
                raise self._error(index, f"has {name} of {_by(tensor)}", f"{fits[0]} x {fits[1]} for each expert")
        return width

    def _top_k(self, index: int, count: int) -> int:
        metadata, top_k = self.metadata, self.top_k[index]
        groups = max(1, metadata.size("expert_group_count", least=0, default=1))
        kept = max(1, metadata.size("expert_group_used_count", least=0, default=groups))
        if count % groups:
            raise metadata.error("expert_group_count", f"a divisor of {count}, the experts of layer {index}")
        if kept > groups:
            raise metadata.error("expert_group_used_count", f"at most {groups}, the number of groups")
        most = count // groups * kept
        if not 1 <= top_k <= most:
            raise metadata.error("expert_used_count", f"1 to {most}, the experts a token of layer {index} may visit")
        return top_k


def _by(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
