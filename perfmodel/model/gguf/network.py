"""The shape and the stored formats of a model, put together from its layers."""

from dataclasses import dataclass

from perfmodel.errors import ModelConfigError
from perfmodel.families import Attention, FeedForward, Shape, Tensor
from perfmodel.model.gguf.feed_forward import FeedForwardReader, Network
from perfmodel.model.gguf.files import read_files
from perfmodel.model.gguf.layers import Sorted, sort_tensors
from perfmodel.model.gguf.metadata import Metadata
from perfmodel.model.gguf.mixers import Mixer, MixerReader
from perfmodel.storage import Storage
from perfmodel.storage.classes import of_classes
from perfmodel.storage.formats import mixed

_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class GgufReading:
    """A GGUF file as it was understood.

    name : the file's name. family : its architecture. shape, storage : what its tensors and values say. notes :
    sentences on defaults taken and parts left out.
    """

    name: str
    family: str
    shape: Shape
    storage: Storage
    notes: tuple[str, ...]


def read_model(path: object) -> GgufReading:
    """The model in a GGUF file, or in the parts of one.

    Raises
    ------
    ModelConfigError : a file is missing or damaged, the architecture is unknown, a tensor is not understood, or values
        and tensors do not fit each other. One line that names file, key or tensor, what was found and what is allowed.
    """
    files = read_files(path)
    metadata = files.metadata
    metadata.check_architecture()
    blocks, extra = metadata.size("block_count"), metadata.size("nextn_predict_layers", least=0, default=0)
    if not extra < blocks <= _MOST_LAYERS:
        raise metadata.error("block_count", f"{extra + 1} to {_MOST_LAYERS}")
    found = sort_tensors(files.tensors, blocks - extra, extra, metadata.where)
    shape, notes = _shape(metadata, found)
    if found.left_out:
        notes.append(
            f"{extra} layer{'s' * (extra > 1)} for multi-token prediction left out, {found.left_out} bytes "
            f"({metadata.key('nextn_predict_layers')})"
        )
    return GgufReading(files.name, metadata.arch, shape, _storage(found, shape.tied_embeddings), tuple(notes))


def _shape(metadata: Metadata, found: Sorted) -> tuple[Shape, list[str]]:
    hidden, num_layers = metadata.size("embedding_length"), len(found.layers)
    embedding, head = found.outside.get("embedding", {}), found.outside.get("head", {})
    table = _table(metadata, embedding.get("token_embd"), "token_embd", hidden)
    tied = "output" not in head
    matrix = Tensor("output", table.shape) if tied else _table(metadata, head["output"], "output", hidden)
    mixers = MixerReader(metadata, num_layers)
    networks = FeedForwardReader(metadata, hidden, num_layers)
    attention: dict[tuple[Mixer, tuple[Tensor, ...], int], list[int]] = {}
    feed_forward: dict[Network, list[int]] = {}
    for index, layer in enumerate(found.layers):
        tensors = layer.part("mixer")
        kind = (mixers.read(index, tensors), tuple(tensors.values()), layer.norm_params("mixer_norm"))
        attention.setdefault(kind, []).append(index)
        feed_forward.setdefault(networks.read(index, layer), []).append(index)
    norms = found.outside.get("norm", {})
    notes = [*mixers.notes, *networks.notes]
    factors = [name for name in norms if name.startswith("rope_")]
    if factors:
        notes.append(
            f"{' and '.join(factors)} counted with the norms, {sum(norms[one].params for one in factors)} numbers"
        )
    if "per_layer_model_proj" in embedding:
        notes.append("per_layer_model_proj counted with the embeddings")
    shape = Shape(
        hidden_size=hidden,
        num_layers=num_layers,
        attention=tuple(
            Attention(
                name=mixer.name,
                layers=tuple(layers),
                tensors=tensors,
                norm_params=norm,
                caches=mixer.caches,
                recurrent_elements=mixer.recurrent_elements,
                convolution_elements=mixer.convolution_elements,
            )
            for (mixer, tensors, norm), layers in attention.items()
        ),
        feed_forward=tuple(
            FeedForward(
                name=network.name,
                layers=tuple(layers),
                norm_params=network.norm_params,
                dense=network.dense,
                shared=network.shared,
                router=network.router,
                experts=network.experts,
            )
            for network, layers in feed_forward.items()
        ),
        vocab_size=table.shape[0],
        embedding=tuple(embedding.values()),
        head=(matrix, *(tensor for name, tensor in head.items() if name != "output")),
        final_norm_params=sum(tensor.params for tensor in norms.values()),
        tied_embeddings=tied,
    )
    return shape, notes


def _table(metadata: Metadata, tensor: Tensor | None, name: str, hidden: int) -> Tensor:
    """A matrix with one row of ``hidden`` numbers for each token."""
    if tensor is None or len(tensor.shape) != 2 or tensor.shape[1] != hidden:
        found = "is missing" if tensor is None else f"has shape {tensor.shape}"
        raise ModelConfigError(
            f"{metadata.where}: tensor {name}.weight {found}; allowed: a matrix with rows of {hidden}, "
            f"as {metadata.key('embedding_length')} says"
        )
    return tensor


def _storage(found: Sorted, tied: bool) -> Storage:
    """The formats of each class. A tied head is read where the embedding table is."""
    formats = {name: mixed(parts) for name, parts in found.formats.items() if parts}
    if tied and "head" not in formats:
        formats["head"] = formats["embedding"]
    return of_classes(Storage().by_class() | formats)
