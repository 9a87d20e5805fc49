"""The shape of a network, its stored precision, and what follows from both."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from perfmodel.errors import ModelConfigError
from perfmodel.families import ConfigKeys, Experts, Shape, language_model, one_line, params_of, read_shape
from perfmodel.model import cache, counts, sources
from perfmodel.model.cache import MlaCache
from perfmodel.model.numbers import bits_of
from perfmodel.storage import Storage, class_bytes, class_params, compute_format, kv_cache_bits, read_storage

_QUANTISED = re.compile(r"(nv|mx)?fp[48]|int[48]|w[48]a(16|8|4)|gptq|awq|[48]-?bit|bnb|gguf", re.IGNORECASE)
_LEAST = {"hidden_size": 1, "num_layers": 1, "vocab_size": 1, "encoder_layers": 0, "final_norm_params": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEModel(Shape):
    """A network: its `Shape`, its name, and the precision its weights are stored in. Dense networks are controls.

    Change a value with ``dataclasses.replace``, as in ``replace(model, storage=Storage.uniform("bfloat16"))`` for a
    float32 checkpoint that is served in 16 bits; the result is checked like a new object.

    Attributes
    ----------
    name : bundled name, or the folder or file the config came from.
    family : the ``model_type`` of the language model.
    storage : stored bits of each class of tensors.
    compute : the number format that the config says products are computed in.
    kv_bits : bits of a cached number, where the config names a precision for the cache [bit].
    assumptions : a sentence for each default taken and each part left out.

    Raises
    ------
    ModelConfigError : a value is impossible, or does not fit another one.
    """

    name: str
    family: str
    storage: Storage = Storage()
    compute: str = "bfloat16"
    kv_bits: float | None = None
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise ModelConfigError(f"model: name is {one_line(name)}; allowed: a text")
        where = f"model {one_line(self.name)}"
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ModelConfigError(f"{where}: {key} is {one_line(value)}; allowed: an integer from {least} up")
        layers = list(range(self.num_layers))
        for key in ("attention", "feed_forward"):
            if sorted(layer for kind in getattr(self, key) for layer in kind.layers) != layers:
                raise ModelConfigError(
                    f"{where}: {key} is {one_line(getattr(self, key))}; "
                    f"allowed: kinds that together name each of the {self.num_layers} layers once"
                )
        for kind in self.feed_forward:
            experts = kind.experts
            if experts is not None and not 1 <= experts.top_k <= experts.count:
                raise ModelConfigError(
                    f"{where}: top_k is {experts.top_k}; allowed: 1 to the number of experts, {experts.count}"
                )

    # --- layers and experts

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(len(kind.layers) for kind in self.feed_forward if kind.experts is not None)

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward network has no experts."""
        return sum(len(kind.layers) for kind in self.feed_forward if kind.name == "dense")

    @property
    def experts(self) -> Experts:
        """The routed experts of one layer, where all MoE layers have the same.

        Raises
        ------
        ModelConfigError : the network is dense, or its layers differ: it can be counted, and not placed or priced.
        """
        kinds = [kind.experts for kind in self.feed_forward if kind.experts is not None]
        # By sizes: the same experts may have other names in encoder and decoder.
        found = list(
            {(one.count, one.top_k, one.size, tuple(t.shape for t in one.tensors)): one for one in kinds}.values()
        )
        where = f"model {one_line(self.name)}"
        if not found:
            raise ModelConfigError(
                f"{where}: no layer has experts (a dense model), so there is nothing to place; allowed: a MoE model"
            )
        if len(found) > 1:
            said = " and ".join(f"top-{one.top_k} of {one.count} of width {one.size}" for one in found[:2])
            raise ModelConfigError(
                f"{where}: layers differ in their experts ({said}); allowed: the same experts in every MoE layer "
                "(the model can be counted, and not priced)"
            )
        return found[0]

    def with_experts(self) -> "MoEModel":
        """The model itself; ModelConfigError unless it is a decoder whose MoE layers have the same experts."""
        _ = self.experts
        if self.encoder_layers:
            raise ModelConfigError(
                f"model {one_line(self.name)}: has an encoder of {self.encoder_layers} layers; allowed: a decoder "
                "(the model can be counted, and not priced)"
            )
        return self

    @property
    def num_experts(self) -> int:
        """Routed experts of one MoE layer, E."""
        return self.experts.count

    @property
    def top_k(self) -> int:
        """Routed experts that one token visits, k."""
        return self.experts.top_k

    @property
    def expert_size(self) -> int:
        """Inner width of one routed expert, d_ff."""
        return self.experts.size

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert, biases included."""
        return self.experts.params

    @property
    def expert_matrices(self) -> tuple[tuple[int, int], ...]:
        """Input and output size of each matrix of one expert, in the order in which they run."""
        return self.experts.matrices

    # --- parameters

    def params_by_class(self) -> dict[str, int]:
        """Stored parameters by class of tensor, as in `perfmodel.storage.Storage`; the sum is ``total_params``."""
        return class_params(self)

    def params_by_layer(self) -> list[dict[str, int | str]]:
        """One row for each layer: its kinds and its parameters by class."""
        return counts.by_layer(self)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding table; of its rows a token reads one."""
        return params_of(self.embedding)

    @property
    def head_params(self) -> int:
        """Parameters of the LM head that every token reads; with tied embeddings, the embedding table."""
        return counts.head_params(self)

    @property
    def routed_expert_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return class_params(self)["expert"]

    @property
    def non_expert_params(self) -> int:
        """Stored parameters outside the routed experts; tied embeddings count once."""
        return self.total_params - self.routed_expert_params

    @property
    def total_params(self) -> int:
        """All stored parameters. Residency follows from this number, never from ``active_params``."""
        return sum(class_params(self).values())

    @property
    def active_params(self) -> int:
        """Parameters outside the routed experts plus ``top_k`` experts per MoE layer, embeddings included.

        Publishers count in three ways; see also ``active_params_without_input_embedding`` (gpt-oss, DeepSeek)
        and ``active_params_without_embeddings``.
        """
        return self.total_params - counts.idle_params(self)

    @property
    def active_params_without_input_embedding(self) -> int:
        """Active parameters that take part in a product: a token looks up one row of the input embedding.

        With tied embeddings the table is also the head, so nothing is left out.
        """
        return self.active_params - (0 if self.tied_embeddings else self.embedding_params)

    @property
    def active_params_without_embeddings(self) -> int:
        """Active parameters without input embedding and head."""
        return self.active_params_without_input_embedding - self.head_params

    # --- bytes

    @property
    def expert_bits(self) -> float:
        """Stored bits of a weight of a routed expert, scales included [bit]."""
        return self.storage.expert.bits

    def stored_as(self, choices: Sequence[str]) -> "MoEModel":
        """The model with other formats for some classes of tensors, unpacked to bfloat16 for every product.

        choices : such as ``expert=q4_k`` or ``all=q8_0``; see `perfmodel.storage.Storage.override`. ModelConfigError
        for an unknown class or format, and for a class without parameters of its own.
        """
        storage = self.storage.override(list(choices))
        params = self.params_by_class()
        for choice in choices:
            name = choice.partition("=")[0].strip().lower()
            if params.get(name, 1) == 0:
                have = ", ".join(one for one, count in params.items() if count)
                raise ModelConfigError(
                    f"format: found {one_line(choice)}, but the model stores no {name}; allowed: {have}, all"
                )
        return dataclasses.replace(self, storage=storage, compute="bfloat16")

    def bytes_by_class(self) -> dict[str, float]:
        """Memory of the stored weights by class of tensor [byte]."""
        return class_bytes(self, self.storage)

    @property
    def weight_bytes(self) -> float:
        """Memory of all weights at their stored bits [byte]."""
        return sum(self.bytes_by_class().values())

    @property
    def non_expert_bytes(self) -> float:
        """Memory of all weights outside the routed experts at their stored bits [byte]."""
        return sum(size for name, size in self.bytes_by_class().items() if name != "expert")

    def expert_bytes(self, bits: float | None = None) -> float:
        """Size of one routed expert [byte], ``expert_params * bits / 8``.

        bits : bits of a weight, scales included [bit], above 0 and at most 64; by default the stored bits.

        Raises
        ------
        ModelConfigError : ``bits`` is not such a number.
        """
        return self.expert_params * bits_of(self.expert_bits if bits is None else bits, "expert_bytes: bits") / 8

    # --- key-value cache

    @property
    def cached_bits(self) -> float:
        """Bits of a cached number [bit]: those that the config names, or 16."""
        return 16.0 if self.kv_bits is None else self.kv_bits

    def kv_parts(
        self, context_tokens: float, bits: float = 16, *, layout: str = "capped", mla_cache: MlaCache = "compressed"
    ) -> dict[str, float]:
        """`kv_bytes` by what it is: keys and values, latent, index keys, recurrent state ... [byte]."""
        return cache.allocated(self.attention, context_tokens, bits, layout, mla_cache)

    def kv_bytes(
        self, context_tokens: float, bits: float = 16, *, layout: str = "capped", mla_cache: MlaCache = "compressed"
    ) -> float:
        """Memory that one sequence needs beside the weights, over all layers [byte].

        The sum over layers and caches of ``elements * entries * bits / 8``, and the constant state of linear attention
        and state spaces.

        Parameters
        ----------
        context_tokens : tokens of context, 0 up to 1e12 [token].
        bits : bits of a cached number [bit], above 0 and at most 64.
        layout : how sliding-window layers are allocated, a name of ``LAYOUTS``: ``capped`` to the window, ``full``
            pages for the whole context, or ``llama.cpp``.
        mla_cache : ``expanded`` for an engine that caches full keys and values instead of the latent of multi-head
            latent attention. No effect on other models.

        Raises
        ------
        ModelConfigError : an argument is not such a value.
        """
        return sum(self.kv_parts(context_tokens, bits, layout=layout, mla_cache=mla_cache).values())

    def kv_read_parts(
        self, context_tokens: float, bits: float = 16, *, mla_cache: MlaCache = "compressed"
    ) -> dict[str, float]:
        """`kv_read_bytes` by what it is [byte]."""
        return cache.read(self.attention, context_tokens, bits, mla_cache)

    def kv_read_bytes(self, context_tokens: float, bits: float = 16, *, mla_cache: MlaCache = "compressed") -> float:
        """What one decode step reads of one sequence's cache and state, over all layers [byte].

        No more than the window, however much is allocated, and no more than sparse attention picks. Arguments and
        errors as in `kv_bytes`.
        """
        return sum(self.kv_read_parts(context_tokens, bits, mla_cache=mla_cache).values())

    def _kv_bytes_per_token(self) -> float:
        """What another token adds while every window is open [byte]; a constant state is no part of it."""
        tokens = math.lcm(*(cache.tokens_per_entry for kind in self.attention for cache in kind.caches))
        return (self.kv_bytes(tokens, layout="full") - self.kv_bytes(0, layout="full")) / tokens

    def describe(self) -> dict[str, str | int | float | bool]:
        """The main figures by name, for a table; units are part of the names."""
        kinds = [kind.experts for kind in self.feed_forward if kind.experts is not None]
        return {
            "name": self.name,
            "family": self.family,
            "layers": self.num_layers,
            "moe_layers": self.num_moe_layers,
            "dense_layers": self.num_dense_layers,
            "hidden_size": self.hidden_size,
            "experts_per_layer": max((one.count for one in kinds), default=0),
            "top_k": max((one.top_k for one in kinds), default=0),
            "expert_size": max((one.size for one in kinds), default=0),
            "expert_params": max((one.params for one in kinds), default=0),
            "shared_expert_params_per_layer": max(params_of(kind.shared) for kind in self.feed_forward),
            "total_params": self.total_params,
            "active_params": self.active_params,
            "active_params_without_input_embedding": self.active_params_without_input_embedding,
            "active_params_without_embeddings": self.active_params_without_embeddings,
            "non_expert_params": self.non_expert_params,
            "tied_embeddings": self.tied_embeddings,
            "stored_expert_bits": self.expert_bits,
            "weights_gb": self.weight_bytes / 1e9,
            "kv_bytes_per_token": self._kv_bytes_per_token(),
        }

    @classmethod
    def from_config(
        cls, source: str | os.PathLike[str] | Mapping[str, object], *, name: str | None = None
    ) -> "MoEModel":
        """Read a Hugging Face ``config.json``.

        Parameters
        ----------
        source : a bundled name (`bundled_models`), a ``config.json``, a folder that holds one, a GGUF file (see
            `from_gguf`), or the parsed config as a mapping. A bundled name wins over a folder of that name; write
            ``./NAME`` for the folder. A ``hf_quant_config.json`` beside the file is read for the stored bits.
        name : name of the model; by default the bundled name, or the folder's or file's name.

        Raises
        ------
        ModelConfigError : nothing can be read there, it is not JSON, a key is missing or impossible, the family is
            unknown, or a key speaks of experts and is not understood. The message is one line that names file, key,
            the value found and what is allowed.
        """
        beside = None
        if isinstance(source, Mapping):
            config, found_name = ConfigKeys(sources.plain_values(source), "config"), ""
        else:
            path = sources.find(source)
            if sources.is_gguf(path):
                return cls.from_gguf(path, name=name)
            config, found_name = ConfigKeys(sources.read_json(path), sources.plain(path)), sources.name_of(path)
            neighbour = path.with_name("hf_quant_config.json")
            if neighbour.is_file():
                beside = ConfigKeys(sources.read_json(neighbour), sources.plain(neighbour))
        reading = read_shape(config)
        _, keys = language_model(config)
        storage = read_storage(keys, reading.shape, beside)
        return cls(
            name=name or found_name or reading.family,
            family=reading.family,
            storage=storage,
            compute=compute_format(keys, beside),
            kv_bits=kv_cache_bits(keys, beside),
            assumptions=(
                *(f"default taken: {text}" for text in reading.defaults),
                *storage.notes,
                *_unsaid(found_name, storage),
                *_of_states(reading.shape),
                *reading.shape.left_out,
            ),
            **{one.name: getattr(reading.shape, one.name) for one in dataclasses.fields(Shape)},
        )

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str], *, name: str | None = None) -> "MoEModel":
        """Read a GGUF file: sizes and stored bits are those of its tensors, and ``weight_bytes`` is exact.

        Needs the extra ``perfmodel[gguf]``. The tensors' numbers are not read.

        Parameters
        ----------
        path : a ``.gguf`` file, or any part ``NAME-00001-of-00002.gguf`` of a split one; all parts must lie beside it.
        name : name of the model; by default the file's name.

        Raises
        ------
        ModelConfigError : a file is missing or damaged, the architecture is unknown, a tensor is not understood, or
            tensors and values contradict each other. One line that names file and key or tensor.
        """
        from perfmodel.model.gguf import read_model

        reading = read_model(path)
        return cls(
            name=name or reading.name,
            family=reading.family,
            storage=reading.storage,
            assumptions=(
                *reading.notes,
                *_of_states(reading.shape),
                "a GGUF file does not say what products are computed in: bfloat16 taken",
            ),
            **{one.name: getattr(reading.shape, one.name) for one in dataclasses.fields(Shape)},
        )


def _of_states(shape: Shape) -> tuple[str, ...]:
    """A sentence on the precision of constant states, which goes its own way."""
    if not any(kind.recurrent_elements or kind.convolution_elements for kind in shape.attention):
        return ()
    return (
        f"recurrent states hold numbers of {cache.RECURRENT_BITS} bits and convolution states of "
        f"{cache.CONVOLUTION_BITS}, whatever the cache holds (assumed)",
    )


def _unsaid(name: str, storage: Storage) -> tuple[str, ...]:
    """A sentence where a folder's name speaks of a quantisation and nothing in it does: a name is no evidence."""
    said = _QUANTISED.search(name)
    if said is None or any(stored.bits < 16 for stored in storage.by_class().values()):
        return ()
    stored = storage.expert.name
    return (f"the name speaks of {said[0]}, and no quantization_config is there: all weights counted as {stored}",)
