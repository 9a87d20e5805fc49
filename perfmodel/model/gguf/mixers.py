"""The token mixer of a layer: attention, linear attention, state space; and what it keeps of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass

from perfmodel.errors import ModelConfigError
from perfmodel.families import Cache, Tensor
from perfmodel.model.gguf.metadata import Metadata
from perfmodel.model.gguf.windows import windows_of


@dataclass(frozen=True, slots=True)
class Mixer:
    """Name, caches and constant state of a layer's mixer, as `perfmodel.model.Attention` has them."""

    name: str
    caches: tuple[Cache, ...] = ()
    recurrent_elements: int = 0
    convolution_elements: int = 0


class MixerReader:
    """Reads the mixers of a model's layers, from the shapes of their tensors and from the metadata.

    notes : sentences on how an unusual part is read.
    """

    def __init__(self, metadata: Metadata, num_layers: int) -> None:
        self.metadata = metadata
        self.heads = metadata.sizes("attention.head_count", num_layers)
        self.kv_heads = metadata.sizes("attention.head_count_kv", num_layers, default=self.heads)
        self.windows, self.notes = windows_of(metadata, num_layers)
        shared = metadata.size("attention.shared_kv_layers", least=0, default=0)
        self.own_keys = num_layers - shared
        if shared:
            self.notes.append(f"the last {shared} layers cache nothing and read the keys of earlier ones")

    def read(self, layer: int, tensors: Mapping[str, Tensor]) -> Mixer:
        """The mixer of one layer.

        Raises
        ------
        ModelConfigError : its tensors are of no known kind, or do not fit each other or the metadata.
        """
        if not tensors:
            return Mixer("none")
        one = _Layer(self, layer, tensors)
        state = one.state()
        if state is not None and state.name == "linear":
            return state
        cached = one.cached()
        if cached is None:
            if state is None:
                raise one.error(f"has {', '.join(list(tensors)[:6])}", "the tensors of a known kind of attention")
            return state
        if state is None:
            return cached
        return Mixer(
            f"{cached.name} and {state.name}", cached.caches, state.recurrent_elements, state.convolution_elements
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    reader: MixerReader
    layer: int
    tensors: Mapping[str, Tensor]

    def error(self, found: str, allowed: str) -> ModelConfigError:
        return ModelConfigError(f"{self.reader.metadata.where}: layer {self.layer} {found}; allowed: {allowed}")

    def outputs(self, name: str) -> int:
        """Rows of a matrix."""
        return self.matrix(name)[0]

    def matrix(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a matrix."""
        tensor = self.tensors.get(name)
        if tensor is None or not tensor.is_matrix:
            raise self.error(f"has no matrix {name}", f"one, beside {', '.join(list(self.tensors)[:6])}")
        return tensor.shape[0], tensor.shape[1]

    def parts(self, what: str, size: int, key: str, count: int) -> int:
        """The size of one of ``count`` heads, of which a matrix has ``size`` rows or columns together."""
        if count < 1 or size % count:
            raise self.error(f"has {size} {what} and {key} {count}", "a whole number of heads")
        return size // count

    # --- caches

    def cached(self) -> Mixer | None:
        """Attention with a cache; None where there is none."""
        if "attn_kv_a_mqa" in self.tensors:
            return self._latent()
        if "attn_q" in self.tensors or "attn_qkv" in self.tensors:
            return self._grouped()
        return None

    def _grouped(self) -> Mixer:
        reader, window = self.reader, self.reader.windows[self.layer]
        name = "full" if window is None else "sliding"
        heads, kv_heads = reader.heads[self.layer], reader.kv_heads[self.layer]
        owns = self.layer < reader.own_keys
        if "attn_qkv" in self.tensors:
            key, value = self._fused(heads, kv_heads)
        elif "attn_k" in self.tensors:
            key = self.parts("outputs of attn_k", self.outputs("attn_k"), "head_count_kv", kv_heads)
            value = key  # without a projection of their own, values are the keys
            if "attn_v" in self.tensors:
                value = self.parts("outputs of attn_v", self.outputs("attn_v"), "head_count_kv", kv_heads)
            query = self.outputs("attn_q")
            if query not in (heads * key, 2 * heads * key):  # twice with an output gate
                raise self.error(f"has {query} outputs of attn_q", f"{heads * key}, for {heads} heads of {key}")
        elif owns:
            raise self.error("has no matrix attn_k", "one beside attn_q")
        else:
            return Mixer(name)
        self._check_length("key_length", key, window)
        inputs = self.matrix("attn_output")[1]
        if inputs != heads * value:
            raise self.error(f"has {inputs} inputs of attn_output", f"{heads * value}, for {heads} heads of {value}")
        if not owns:
            return Mixer(name)
        both = key + value
        cache = Cache(
            name="keys and values",
            elements=kv_heads * both,
            flops_per_entry=2 * heads * both,
            window=window,
            heads=kv_heads,
        )
        return Mixer(name, (cache,))

    def _fused(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Sizes of a key and of a value where one matrix makes queries, keys and values."""
        metadata = self.reader.metadata
        hidden = metadata.size("embedding_length")
        size = hidden // heads if heads else 0
        key = metadata.size("attention.key_length", default=size)
        value = metadata.size("attention.value_length", default=key)
        rows = self.outputs("attn_qkv")
        rest = kv_heads * (key + value)
        if rows not in (heads * key + rest, 2 * heads * key + rest) or not rest:
            raise self.error(
                f"has {rows} outputs of attn_qkv",
                f"{heads * key + rest}, for {heads} queries and {kv_heads} keys of {key}, and values of {value}",
            )
        return key, value

    def _check_length(self, key: str, found: int, window: int | None) -> None:
        """Refuse metadata that gives another size of a head than the tensors have."""
        metadata = self.reader.metadata
        name = f"attention.{key}"
        if window is not None and metadata.has(f"{name}_swa"):
            name = f"{name}_swa"
        if metadata.has(name) and metadata.size(name) != found:
            raise metadata.error(name, f"{found}, which layer {self.layer} has by its tensors")

    def _latent(self) -> Mixer:
        metadata, heads = self.reader.metadata, self.reader.heads[self.layer]
        entry = self.outputs("attn_kv_a_mqa")
        rank = metadata.size("attention.kv_lora_rank")
        norm = self.tensors.get("attn_kv_a_norm")
        if rank >= entry or (norm is not None and norm.params != rank):
            raise metadata.error(
                "attention.kv_lora_rank", f"{norm.params if norm else f'below {entry}'}, by layer {self.layer}"
            )
        query = self.outputs("attn_q_b" if "attn_q_b" in self.tensors else "attn_q")
        key = self.parts("outputs of queries", query, "head_count", heads)
        value = self.parts("inputs of attn_output", self.matrix("attn_output")[1], "head_count", heads)
        if key <= entry - rank:
            raise self.error(f"has keys of {key}, {entry - rank} of them turned by position", "larger keys")
        picked = None
        if metadata.has("attention.indexer.top_k"):
            picked = metadata.size("attention.indexer.top_k")
        caches = [
            Cache(
                name="latent",
                elements=entry,
                flops_per_entry=2 * heads * (entry + rank),
                read_entries=picked,
                expanded_elements=heads * (key + value),
                expanded_heads=heads,
            )
        ]
        if "indexer.attn_k" in self.tensors:
            size = self.outputs("indexer.attn_k")
            self.parts("outputs of indexer.attn_q_b", self.outputs("indexer.attn_q_b"), "index keys of", size)
            work = 2 * self.outputs("indexer.attn_q_b")
            caches.append(Cache(name="index keys", elements=size, flops_per_entry=work))
        return Mixer("latent", tuple(caches))

    # --- constant state

    def state(self) -> Mixer | None:
        """A mixer with constant state; None where there is none."""
        metadata = self.reader.metadata
        if "ssm_conv1d_q" in self.tensors:
            convolution = sum(self._convolution(f"ssm_conv1d_{one}") for one in "qkv")
            value = self.outputs("attn_v")
            return Mixer(
                "linear", recurrent_elements=metadata.size("kda.head_dim") * value, convolution_elements=convolution
            )
        if "ssm_conv1d" in self.tensors:
            inner = metadata.size("ssm.inner_size")
            if inner != self.matrix("ssm_out")[1]:
                raise metadata.error("ssm.inner_size", f"{self.matrix('ssm_out')[1]}, the inputs of ssm_out")
            linear = any(name in self.tensors for name in ("ssm_ba", "ssm_beta", "ssm_alpha"))
            return Mixer(
                "linear" if linear else "mamba",
                recurrent_elements=metadata.size("ssm.state_size") * inner,
                convolution_elements=self._convolution("ssm_conv1d"),
            )
        if "shortconv.conv" in self.tensors:
            return Mixer("convolution", convolution_elements=self._convolution("shortconv.conv"))
        return None

    def _convolution(self, name: str) -> int:
        """Inputs that a convolution keeps: all it sees but the newest."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.error(f"has no {name}", f"one, beside {', '.join(list(self.tensors)[:6])}")
        taps = tensor.shape[-1]
        return (taps - 1) * (tensor.params // taps)
