"""Routing traces from what other tools write: one class method a layout, the work being its importer's."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from perfmodel.errors import TraceError

if TYPE_CHECKING:
    from perfmodel.routing.importers.base import Imported, ImportOptions
    from perfmodel.routing.trace import RoutingTrace

_Path = str | Path
_Counts = int | Sequence[int]
#: Letters of a text that is printed in a message as the path that it may be.
_LONG = 300


class TraceFormats:
    """The ``from_*`` methods of :class:`perfmodel.routing.trace.RoutingTrace`.

    Options say what a layout leaves open, with the meanings of
    :class:`perfmodel.routing.importers.base.ImportOptions`: ``model`` and ``num_experts`` everywhere, and
    ``prompt_len``, ``sequence_len``, ``layers``, ``top_k``, ``family``, ``config``, ``expert_map`` or ``mend`` where
    the layout takes them. ``prompt_len`` and ``sequence_len`` are one number, or one for each sequence. What is wrong
    with a recording is told by :func:`perfmodel.routing.defects.check`, or by
    :func:`perfmodel.routing.importers.import_files`, which is also told what only the files show. All raise
    :class:`TraceError` for what breaks the layout, and for an option that it does not take.
    """

    __slots__ = ()

    @classmethod
    def from_vllm(
        cls, source: _Path | ArrayLike | Sequence[Any], *, prompt_len: _Counts | None = None, **options: Any
    ) -> "RoutingTrace":
        """The ``routed_experts`` of vLLM: an array [tokens, layers, k], a list of such, or a file or files of them.

        ``prompt_len`` is the number of prompt tokens of each request. Layers that hold zeros only are left out.
        """
        said = _options({"prompt_len": prompt_len, **options})
        files = _paths(source)
        if files is not None:
            return _read("vllm", files, said)
        from perfmodel.routing.importers.vllm import from_arrays

        return _in_memory("vllm", from_arrays, source, said)

    @classmethod
    def from_vllm_jsonl(cls, file: _Path, **options: Any) -> "RoutingTrace":
        """A log of vLLM's routing with one JSON object a line."""
        return _read("vllm-jsonl", [file], _options(options))

    @classmethod
    def from_sglang(cls, *files: _Path, **options: Any) -> "RoutingTrace":
        """Dumps of SGLang's expert distribution recorder in its mode per_token, a file for each rank.

        Requests that were made one at a time, and whose positions do not tell them apart, need ``sequence_len``.
        """
        return _read("sglang", files, _options(options))

    @classmethod
    def from_sglang_response(
        cls, source: _Path | Sequence[str], *, prompt_len: _Counts | None = None, **options: Any
    ) -> "RoutingTrace":
        """The ``routed_experts`` of SGLang or SGL-JAX: a file of responses, or a list of their base64 texts.

        Texts need ``prompt_len``, ``top_k`` and ``layers``, or a ``config`` in place of the last two.
        """
        said = _options({"prompt_len": prompt_len, **options})
        if isinstance(source, str) and len(source) > _LONG and not _exists(source):
            raise TraceError(f"found one text of {len(source):,} letters, expected a path or a list of base64 texts")
        if isinstance(source, str | PathLike):
            return _read("sglang-response", [Path(source)], said)
        from perfmodel.routing.importers.sglang_response import from_texts

        return _in_memory("sglang-response", from_texts, source, said)

    @classmethod
    def from_router_logits(cls, source: Any, **options: Any) -> "RoutingTrace":
        """Router logits of a Transformers model, by its family's own rule; needs ``family`` or ``config``.

        ``source`` is a file or a list of files, or what is in memory: the tuple ``router_logits`` of the model's
        output, or a table with ``router_logits``, ``attention_mask`` and whatever else a file may hold.
        """
        said = _options(options)
        files = _paths(source)
        if files is not None:
            return _read("router-logits", files, said)
        from perfmodel.routing.importers.router_logits import from_arrays

        return _in_memory("router-logits", from_arrays, source, said)

    @classmethod
    def from_llamacpp_csv(cls, *files: _Path, **options: Any) -> "RoutingTrace":
        """Tables ``layer_id,expert_ids`` of tools around llama.cpp."""
        return _read("llamacpp-csv", files, _options(options))

    @classmethod
    def from_esft(cls, *files: _Path, **options: Any) -> "RoutingTrace":
        """Expert scores of ESFT, a text file for each layer with a line for each sequence."""
        return _read("esft", files, _options(options))

    @classmethod
    def from_dynande(cls, *files: _Path, **options: Any) -> "RoutingTrace":
        """Scores of the DynaNDE simulator, a table of dense rows for each layer."""
        return _read("dynande", files, _options(options))

    @classmethod
    def from_router_trace(cls, file: _Path, **options: Any) -> "RoutingTrace":
        """A JSON document in the RouterTrace v2 schema."""
        return _read("router-trace-v2", [file], _options(options))

    @classmethod
    def from_row_phase(cls, file: _Path, **options: Any) -> "RoutingTrace":
        """An ``.npz`` file with one row a token, and a sequence number and a phase beside it."""
        return _read("row-phase", [file], _options(options))


def _options(said: dict[str, Any]) -> "ImportOptions":
    from perfmodel.routing.importers.options import options_of

    return options_of(said)


def _paths(source: Any) -> list[_Path] | None:
    """The files that are meant, or None where it is something else."""
    if isinstance(source, str | PathLike):
        return [Path(source)]
    several = isinstance(source, list | tuple) and source and all(isinstance(one, str | PathLike) for one in source)
    return [Path(one) for one in source] if several else None


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or no path at all
        return False


def _read(format_name: str, files: Sequence[_Path], options: "ImportOptions") -> "RoutingTrace":
    from perfmodel.routing.importers import import_files

    return _trace(import_files(format_name, files, options))


def _in_memory(format_name: str, make: Any, source: Any, options: "ImportOptions") -> "RoutingTrace":
    from perfmodel.routing.importers.registry import check_taken, find_format, with_defects

    check_taken(find_format(format_name), options)
    return _trace(with_defects(make(source, options), options))


def _trace(imported: "Imported") -> "RoutingTrace":
    from perfmodel.routing.trace import RoutingTrace

    assert isinstance(imported.result, RoutingTrace)
    return imported.result
