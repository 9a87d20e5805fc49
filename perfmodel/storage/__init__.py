"""In how many bits the weights of a network are stored, by class of tensor."""

from perfmodel.storage.classes import CLASSES, Storage
from perfmodel.storage.formats import FORMATS, GGUF_BLOCKS, Format, format_named
from perfmodel.storage.quantization import compute_format, kv_cache_bits, read_storage
from perfmodel.storage.totals import class_bytes, class_params

__all__ = [
    "CLASSES",
    "FORMATS",
    "GGUF_BLOCKS",
    "Format",
    "Storage",
    "class_bytes",
    "class_params",
    "compute_format",
    "format_named",
    "kv_cache_bits",
    "read_storage",
]
