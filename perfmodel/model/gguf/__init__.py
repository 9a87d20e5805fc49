"""Models read from GGUF files: exact sizes from the list of tensors, the rest from the metadata.

``files.py`` finds the files and lists their tensors, ``metadata.py`` is the checked access to values,
``architectures.py`` says which architectures are known and which of their layers have a sliding window, ``names.py``
to which class of tensors a name belongs, ``layers.py`` sorts the tensors by layer, ``mixers.py`` and
``feed_forward.py`` read the halves of a layer, and ``network.py`` puts the shape and the stored formats together.
"""

from perfmodel.model.gguf.architectures import ARCHITECTURES
from perfmodel.model.gguf.files import GgufTensor, gguf_tensors
from perfmodel.model.gguf.network import GgufReading, read_model

__all__ = ["ARCHITECTURES", "GgufReading", "GgufTensor", "gguf_tensors", "read_model"]
