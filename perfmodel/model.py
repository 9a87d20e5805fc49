"""The shape of a Mixture-of-Experts network, read from a Hugging Face ``config.json``."""

import dataclasses
import difflib
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Literal

from perfmodel.errors import ModelConfigError
from perfmodel.families import FAMILIES, AttentionKind, ConfigKeys, Shape, one_line, read_shape

__all__ = ["AttentionKind", "MoEModel", "bundled_models", "supported_families"]

_BUNDLED = Path(__file__).resolve().parent / "shapes"
_LARGEST_FILE_BYTES = 16 * 2**20
_LEAST = {
    "hidden_size": 1,
    "num_layers": 1,
    "num_experts": 1,
    "top_k": 1,
    "expert_size": 1,
    "expert_params": 1,
    "vocab_size": 1,
    "shared_expert_params": 0,
    "router_params": 0,
    "dense_ffn_params": 0,
    "norm_params": 0,
}
_DTYPE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


def supported_families() -> tuple[str, ...]:
    """The ``model_type`` values that `MoEModel.from_config` reads."""
    return tuple(FAMILIES)


def bundled_models() -> tuple[str, ...]:
    """Names of the models whose shape comes with the package."""
    return tuple(sorted(path.stem for path in _BUNDLED.glob("*.json")))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEModel(Shape):
    """A Mixture-of-Experts decoder: its `Shape`, its name, and the precision its weights are stored in.

    Change a value with ``dataclasses.replace``, as in ``replace(model, bits=16, expert_bits=16.0)`` for a
    float32 checkpoint that is served in 16 bits; the result is checked like a new object.

    Attributes:
        name: Bundled name, or the folder or file the config came from.
        family: Its ``model_type``.
        bits: Stored bits of a weight outside the routed experts [bit]: those of the config's dtype, 16 if it
            names none. Quantised releases keep embeddings, head, norms and router at these bits; that some
            also quantise attention and shared experts is not modelled and overstates their memory.
        expert_bits: Stored bits of a weight of a routed expert, with its share of the block scales [bit]: 16
            for bfloat16, 4.25 for MXFP4 (an 8-bit scale for 32 weights), 4.5 for NVFP4 (an 8-bit scale for 16
            weights), ``8 + 32 / block`` for FP8 in blocks.

    Raises:
        ModelConfigError: A value is impossible, or does not fit another one.
    """

    name: str
    family: str
    bits: int = 16
    expert_bits: float = 16.0

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not name:
            raise ModelConfigError(f"model: name is {one_line(name)}; allowed: a text")
        where = f"model {one_line(self.name)}"
        for key, least in _LEAST.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ModelConfigError(f"{where}: {key} is {one_line(value)}; allowed: an integer from {least} up")
        layers = range(self.num_layers)
        if self.top_k > self.num_experts:
            raise ModelConfigError(
                f"{where}: top_k is {self.top_k}; allowed: at most the number of experts, {self.num_experts}"
            )
        if not self.moe_layers or list(self.moe_layers) != sorted(set(self.moe_layers) & set(layers)):
            raise ModelConfigError(
                f"{where}: moe_layers is {one_line(self.moe_layers)}; "
                f"allowed: ascending layer indices below {self.num_layers}, at least one"
            )
        if sorted(layer for kind in self.attention for layer in kind.layers) != list(layers):
            raise ModelConfigError(
                f"{where}: attention is {one_line(self.attention)}; "
                f"allowed: kinds that together name each of the {self.num_layers} layers once"
            )
        _check_bits(self.bits, f"{where}: bits")
        _check_bits(self.expert_bits, f"{where}: expert_bits")

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return len(self.moe_layers)

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward network has no experts."""
        return self.num_layers - len(self.moe_layers)

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding table; of its rows a token reads one."""
        return self.vocab_size * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the LM head that every token reads; with tied embeddings, the embedding table."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_params(self) -> int:
        """Parameters of the attention of all layers."""
        return sum(len(kind.layers) * kind.params for kind in self.attention)

    @property
    def routed_expert_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_params

    @property
    def non_expert_params(self) -> int:
        """Stored parameters outside the routed experts; tied embeddings count once."""
        return (
            self.embedding_params
            + (0 if self.tied_embeddings else self.head_params)
            + self.norm_params
            + self.attention_params
            + self.num_moe_layers * (self.router_params + self.shared_expert_params)
            + self.num_dense_layers * self.dense_ffn_params
        )

    @property
    def total_params(self) -> int:
        """All stored parameters. Residency follows from this number, never from ``active_params``."""
        return self.non_expert_params + self.routed_expert_params

    @property
    def active_params(self) -> int:
        """Parameters outside the routed experts plus ``top_k`` experts per MoE layer, embeddings included.

        Publishers count in three ways; see also ``active_params_without_input_embedding`` (gpt-oss, DeepSeek)
        and ``active_params_without_embeddings``.
        """
        return self.non_expert_params + self.num_moe_layers * self.top_k * self.expert_params

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

    @property
    def weight_bytes(self) -> float:
        """Memory of all weights at their stored bits [byte]."""
        return self.non_expert_params * self.bits / 8 + self.routed_expert_params * self.expert_bits / 8

    def expert_bytes(self, bits: float | None = None) -> float:
        """Size of one routed expert [byte], ``expert_params * bits / 8``.

        Args:
            bits: Bits of a weight, scales included [bit], above 0 and at most 64; by default the stored bits.

        Raises:
            ModelConfigError: ``bits`` is not such a number.
        """
        return self.expert_params * _check_bits(self.expert_bits if bits is None else bits, "expert_bytes: bits") / 8

    def kv_bytes(
        self,
        context_tokens: float,
        bits: float = 16,
        *,
        window_capped: bool = True,
        mla_cache: Literal["compressed", "expanded"] = "compressed",
    ) -> float:
        """Key-value cache of one sequence over all layers [byte].

        The sum over layers of ``kv_elements_per_token * min(context, window) * bits / 8``. The default is
        what one decode step reads and what an engine must keep at least.

        Args:
            context_tokens: Tokens of context, 0 up to 1e12 [token].
            bits: Bits of a cached number [bit], above 0 and at most 64.
            window_capped: False for what an engine allocates that keeps pages of equal size for all layers,
                and so gives sliding-window layers room for the whole context.
            mla_cache: ``"expanded"`` for an engine that caches full keys and values instead of the latent of
                multi-head latent attention. No effect on other models.

        Raises:
            ModelConfigError: An argument is not such a value.
        """
        tokens = _number(context_tokens)
        if not 0 <= tokens <= 1e12:
            raise ModelConfigError(
                f"kv_bytes: context_tokens is {one_line(context_tokens)}; allowed: a number from 0 to 1e12"
            )
        cache: object = mla_cache
        if not isinstance(cache, str) or cache not in ("compressed", "expanded"):
            raise ModelConfigError(f"kv_bytes: mla_cache is {one_line(cache)}; allowed: 'compressed', 'expanded'")
        elements = 0.0
        for kind in self.attention:
            cached = tokens if kind.window is None or not window_capped else min(tokens, kind.window)
            per_token = kind.kv_elements_per_token
            if mla_cache == "expanded" and kind.expanded_kv_elements_per_token is not None:
                per_token = kind.expanded_kv_elements_per_token
            elements += len(kind.layers) * cached * per_token
        return elements * _check_bits(bits, "kv_bytes: bits") / 8

    def describe(self) -> dict[str, str | int | float | bool]:
        """The main figures by name, for a table; units are part of the names."""
        return {
            "name": self.name,
            "family": self.family,
            "layers": self.num_layers,
            "moe_layers": self.num_moe_layers,
            "dense_layers": self.num_dense_layers,
            "hidden_size": self.hidden_size,
            "experts_per_layer": self.num_experts,
            "top_k": self.top_k,
            "expert_size": self.expert_size,
            "expert_params": self.expert_params,
            "shared_expert_params_per_layer": self.shared_expert_params,
            "total_params": self.total_params,
            "active_params": self.active_params,
            "active_params_without_input_embedding": self.active_params_without_input_embedding,
            "active_params_without_embeddings": self.active_params_without_embeddings,
            "non_expert_params": self.non_expert_params,
            "tied_embeddings": self.tied_embeddings,
            "stored_bits": self.bits,
            "stored_expert_bits": self.expert_bits,
            "weights_gb": self.weight_bytes / 1e9,
            "kv_bytes_per_token": self.kv_bytes(1),
        }

    @classmethod
    def from_config(
        cls, source: str | os.PathLike[str] | Mapping[str, object], *, name: str | None = None
    ) -> "MoEModel":
        """Read a Hugging Face ``config.json``.

        Args:
            source: A bundled name (`bundled_models`), a ``config.json``, a folder that holds one, or the
                parsed config as a mapping. A bundled name wins over a folder of that name; write ``./NAME``
                for the folder. A ``hf_quant_config.json`` beside the file is read for the stored bits.
            name: Name of the model; by default the bundled name, or the folder's or file's name.

        Raises:
            ModelConfigError: Nothing can be read there, it is not JSON, a key is missing or impossible, the
                family is not supported, or the model has no experts. The message is one line that names file,
                key, the value found and what is allowed.
        """
        beside = None
        if isinstance(source, Mapping):
            config, found_name = ConfigKeys(source, "config"), ""
        else:
            path = _find(source)
            config, found_name = ConfigKeys(_read(path), _plain(path)), _name_of(path)
            if path.with_name("hf_quant_config.json").is_file():
                beside = path.with_name("hf_quant_config.json")
        shape = read_shape(config)
        bits = _dtype_bits(config)
        family = str(config.values["model_type"])
        return cls(
            name=name or found_name or family,
            family=family,
            bits=bits,
            expert_bits=_expert_bits(config, beside) or float(bits),
            **{field.name: getattr(shape, field.name) for field in dataclasses.fields(Shape)},
        )


def _number(value: object) -> float:
    """The value as a float; not-a-number for what is no real number, and for integers beyond floats."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _check_bits(bits: object, what: str) -> float:
    number = _number(bits)
    if not 0 < number <= 64:
        raise ModelConfigError(f"{what} is {one_line(bits)}; allowed: a number above 0 and at most 64")
    return number


def _dtype_bits(config: ConfigKeys) -> int:
    """Bits of the dtype that the weights are stored in where they are not quantised [bit]."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if not config.has(key):
        return 16
    return _DTYPE_BITS[config.choice(key, *_DTYPE_BITS)]


def _expert_bits(config: ConfigKeys, beside: Path | None) -> float | None:
    """Stored bits of a weight of a quantised routed expert with its share of scales [bit]; else None.

    ``beside`` is the ``hf_quant_config.json`` of an NVIDIA release.
    """
    if config.has("quantization_config"):
        table = _table(config, "quantization_config")
        if table.choice("quant_method", "mxfp4", "fp8") == "mxfp4":
            return 4 + 8 / 32
        allowed = "two positive integers, or null for one scale a tensor"
        block = table.sequence("weight_block_size", allowed)
        sides = [side for side in block if type(side) is int and 1 <= side <= 2**20]
        if len(sides) != len(block) or len(sides) not in (0, 2):
            raise table.error("weight_block_size", allowed)
        return 8 + 32 / (sides[0] * sides[1]) if sides else 8.0
    if beside is not None:
        table = _table(ConfigKeys(_read(beside), _plain(beside)), "quantization")
        nvfp4 = table.choice("quant_algo", "NVFP4", "FP8") == "NVFP4"
        return 4 + 8 / table.size("group_size") if nvfp4 else 8.0
    return None


def _table(config: ConfigKeys, key: str) -> ConfigKeys:
    """The object under a key."""
    table = config.values.get(key)
    if not isinstance(table, Mapping):
        raise config.error(key, "an object that says how the weights are quantised")
    return ConfigKeys(table, f"{config.where}: {key}")


def _plain(path: object) -> str:
    """A path as one short printable line, also when its name holds line breaks or bytes that are no text."""
    text = str(path)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= 300 else f"{text[:297]}..."


def _find(source: object) -> Path:
    """The JSON file that a name, a file or a folder stands for."""
    allowed = "a config.json, a folder that holds one, or a bundled name: " + ", ".join(bundled_models())
    if not isinstance(source, str | os.PathLike):
        raise ModelConfigError(f"model config: found {one_line(source)}; allowed: {allowed}, or a mapping")
    text = os.fspath(source)
    if isinstance(source, str) and source in bundled_models():
        return _BUNDLED / f"{source}.json"
    if not isinstance(text, str) or not text.strip():
        raise ModelConfigError(f"model config: found {one_line(source)}; allowed: {allowed}")
    try:
        path = Path(text)
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            path = path / "config.json"
            if not path.exists():
                raise ModelConfigError(f"{_plain(text)}: the folder holds no config.json; allowed: {allowed}")
            mode = path.stat().st_mode
    except FileNotFoundError:
        close = difflib.get_close_matches(text, bundled_models(), n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ModelConfigError(f"{_plain(text)}: no such file or model{hint}; allowed: {allowed}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{_plain(text)}: cannot be opened: {_reason(error)}; allowed: {allowed}") from None
    if not stat.S_ISREG(mode):
        raise ModelConfigError(f"{_plain(path)}: is not a regular file; allowed: {allowed}")
    return path


def _reason(error: Exception) -> str:
    """What an exception says, on one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a JSON file; a key that comes twice is refused, for readers differ on which counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {one_line(twice)} occurs twice in one object")
    return values


def _read(path: Path) -> Mapping[str, object]:
    """The object in a JSON file."""
    where = _plain(path)
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        if len(content) > _LARGEST_FILE_BYTES:
            raise ModelConfigError(f"{where}: larger than 16 MiB; allowed: a config.json, which has a few KiB")
        values = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique)
    except OSError as error:
        raise ModelConfigError(f"{where}: cannot be read: {_reason(error)}; allowed: a readable config.json") from None
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{where}: byte {error.start} is not UTF-8 text; allowed: a JSON object") from None
    except RecursionError:
        raise ModelConfigError(f"{where}: nested too deeply; allowed: a JSON object") from None
    except ValueError as error:
        if isinstance(error, ModelConfigError):
            raise
        raise ModelConfigError(f"{where}: not valid JSON: {_reason(error)}; allowed: a JSON object") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{where}: found {one_line(values)}; allowed: a JSON object")
    return values


def _name_of(path: Path) -> str:
    """The file's name; for a ``config.json`` that of its folder or of its entry in the Hugging Face cache."""
    if path.name != "config.json":
        return path.stem
    parents = path.absolute().parents
    cached = [folder.name for folder in parents if folder.name.startswith("models--")]
    return cached[0].removeprefix("models--").replace("--", "/") if cached else parents[0].name
