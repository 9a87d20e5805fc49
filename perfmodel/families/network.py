"""The parts of a network, as the family readers describe them: layers, their tensors, and what they cache."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Tensor(NamedTuple):
    """One parameter of a checkpoint.

    name : module path as checkpoints spell it, within its layer (``self_attn.q_proj``) or, for what belongs to no
        layer, within the network (``lm_head``). Biases and other parameters that are no weight of their module end in
        their own name (``self_attn.q_proj.bias``).
    shape : as stored; a matrix is [outputs, inputs].
    """

    name: str
    shape: tuple[int, ...]

    @property
    def params(self) -> int:
        """Parameters [1]."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it is the weight of a linear map, which is what weight quantisation packs."""
        return len(self.shape) == 2


Tensors = tuple[Tensor, ...]


def params_of(tensors: Tensors) -> int:
    """Parameters of several tensors [1]."""
    return sum(tensor.params for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What an attention layer keeps of every token of context. All numbers are for one layer.

    name : ``keys and values``, ``latent``, ``index keys``, ``compressed``, ``cross`` ...
    elements : numbers of one entry [1]: ``2 * kv_heads * head_dim`` for grouped-query attention,
        ``kv_lora_rank + qk_rope_head_dim`` for latent attention.
    flops_per_entry : work of one query on one entry that it reads, scores and values [flop]:
        ``2 * heads * (head_dim + head_dim)``; for latent attention computed on the latent (absorbed projections)
        ``2 * heads * (kv_lora_rank + qk_rope_head_dim + kv_lora_rank)``.
    window : latest tokens that a query sees [token], or None for the whole context.
    tokens_per_entry : tokens that share one entry (compressed attention) [token].
    read_entries : most entries that one query reads (sparse attention picks that many) [1]; None for all it sees.
    expanded_elements : what an engine caches that unpacks the latent to keys and values [1],
        ``heads * (qk_nope_head_dim + qk_rope_head_dim + v_head_dim)``; None where there is no latent.
    heads : key-value heads that an entry consists of, which tensor parallelism divides among GPUs; 1 for what all query
        heads share, such as a latent.
    expanded_heads : the same of ``expanded_elements``.
    borrowed : whether it is the cache of a layer before, which is read here and kept there.
    """

    name: str
    elements: int
    flops_per_entry: int
    window: int | None = None
    tokens_per_entry: int = 1
    read_entries: int | None = None
    expanded_elements: int | None = None
    heads: int = 1
    expanded_heads: int = 1
    borrowed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One kind of token mixer (attention, linear attention, state space) and the layers that have it.

    All numbers are for one layer.

    name : ``full``, ``sliding``, ``latent``, ``linear``, ``mamba``, ``cross`` ..., or ``none`` for layers without one.
    layers : indices of the layers of this kind, ascending.
    tensors : projections with their biases, norms of queries and keys, sinks ...
    norm_params : norms of the residual stream before and after it [1].
    caches : what grows with the context; empty for linear attention.
    recurrent_elements : numbers of the constant state of one sequence that a step reads and writes [1].
    convolution_elements : numbers of the constant state of its short convolution [1].
    """

    name: str
    layers: tuple[int, ...]
    tensors: Tensors
    norm_params: int
    caches: tuple[Cache, ...] = ()
    recurrent_elements: int = 0
    convolution_elements: int = 0

    @property
    def params(self) -> int:
        """Parameters without the norms of the residual stream [1]."""
        return params_of(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of one layer: all alike.

    count : routed experts, E. top_k : experts that one token visits, k. size : inner width of one expert, d_ff.
    tensors : parameters of *one* expert, its matrices in the order in which they run.
    """

    count: int
    top_k: int
    size: int
    tensors: Tensors

    @property
    def params(self) -> int:
        """Parameters of one expert, biases included [1]."""
        return params_of(self.tensors)

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Input and output size of each matrix of one expert, in the order in which they run."""
        return tuple((tensor.shape[1], tensor.shape[0]) for tensor in self.tensors if tensor.is_matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """One kind of feed-forward network and the layers that have it. All numbers are for one layer.

    name : ``dense``, ``moe``, or ``none`` for layers without one.
    layers : indices of the layers of this kind, ascending.
    norm_params : norms of the residual stream before and after it [1].
    dense : what every token passes: the network of a dense layer, or one that runs beside the routed experts.
    shared : shared experts with their gate.
    router : router of the layer, with its biases.
    experts : the routed experts; None for a layer without.
    """

    name: str
    layers: tuple[int, ...]
    norm_params: int
    dense: Tensors = ()
    shared: Tensors = ()
    router: Tensors = ()
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a family reader finds out: the sizes of a network.

    hidden_size : width of the residual stream, d.
    num_layers : layers, L. Layers for multi-token prediction are not part of the network.
    encoder_layers : layers of the encoder, which come first; 0 for a decoder.
    attention, feed_forward : the kinds of either; together the ``layers`` of each name every layer once.
    vocab_size : rows of the embedding table, V.
    embedding : the embedding table, and other tables of which a token reads one row.
    head : the LM head. With tied embeddings its matrix is the embedding table and is stored once.
    final_norm_params : the norms after the last layers [1].
    tied_embeddings : whether the head is the embedding table.
    left_out : sentences on what the config describes and the shape leaves out (vision tower, layers for multi-token
        prediction ...), and on how an unusual part is read.
    """

    hidden_size: int
    num_layers: int
    encoder_layers: int = 0
    attention: tuple[Attention, ...]
    feed_forward: tuple[FeedForward, ...]
    vocab_size: int
    embedding: Tensors
    head: Tensors
    final_norm_params: int
    tied_embeddings: bool
    left_out: tuple[str, ...] = ()

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have routed experts, ascending."""
        return tuple(sorted(layer for kind in self.feed_forward if kind.experts is not None for layer in kind.layers))
