"""Routing traces from what other tools write: one class method a layout, the work being its importer's."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from perfmodel.errors import TraceError
from perfmodel.routing.keywords import said_by_keyword

if TYPE_CHECKING:
    from perfmodel.routing.importers.base import Imported, ImportOptions
    from perfmodel.routing.trace import RoutingTrace

_Path = str | Path
_Counts = int | Sequence[int]
#: Letters of a text that is printed in a message as the path that it may be.
_LONG = 300


class TraceFormats:
    """The ``from_*`` methods of :class:`perfmodel.routing.trace.RoutingTrace`.

    What a layout leaves open is said by keywords, which mean the same in all of them:

    ====================  =============================================================================
    ``model``             name of the recorded model
    ``num_experts``       routed experts a layer; by default what the file says, or the largest id + 1
    ``top_k``             picks of a token in a layer
    ``prompt_len``        prefill rows: one number for every sequence, or one for each
    ``sequence_len``      rows of every sequence, where a file does not say where one ends
    ``layers``            model layer of every row of the layer axis, increasing
    ``family``            model family, whose rule turns router logits into picks and weights
    ``config``            the model's config.json, or its folder
    ``expert_map``        file with the logical expert of every physical slot [layers, slots]
    ``mend``              names of defects to mend, see :data:`perfmodel.routing.defects.DEFECTS`
    ====================  =============================================================================

    Files are paths, one after another or in a list. What is wrong with a recording is told by
    :func:`perfmodel.routing.defects.check`, or by :func:`perfmodel.routing.importers.import_files`, which is also told
    what only the files show. All raise :class:`TraceError` for what breaks the layout or an option.
    """

    __slots__ = ()

    @classmethod
    @said_by_keyword()
    def from_vllm(
        cls,
        source: _Path | ArrayLike | Sequence[Any],
        *,
        model: str | None = None,
        num_experts: int | None = None,
        prompt_len: _Counts | None = None,
        sequence_len: _Counts | None = None,
        layers: _Counts | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """The ``routed_experts`` of vLLM: an array, a list of such, or a file or files of them.

        Integers [tokens, layers, k] of each request, as arrays, tensors or nested lists; -1, or 0 in every pick, where
        a layer has no experts, and such layers are left out. A batch [requests, tokens, layers, k] needs
        ``sequence_len``, the rows of each request; of one array it says where the sequences in it end. The first
        ``prompt_len`` rows of a request are prefill, the others decode. No weights.
        """
        said = _options(
            {
                "model": model,
                "num_experts": num_experts,
                "prompt_len": prompt_len,
                "sequence_len": sequence_len,
                "layers": layers,
                "mend": mend,
            }
        )
        files = _paths(source)
        if files is not None:
            return _read("vllm", files, said)
        from perfmodel.routing.importers.vllm import from_arrays

        return _in_memory("vllm", from_arrays, source, said)

    @classmethod
    @said_by_keyword()
    def from_vllm_jsonl(
        cls,
        file: _Path,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        prompt_len: _Counts | None = None,
        sequence_len: _Counts | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """A log of vLLM's routing with one JSON object a token and layer, with weights where it has them.

        Phases are those of the forward calls that the log shows, a call of several tokens being prefill, or what
        ``prompt_len`` says; logs of generated tokens alone are all decode.
        """
        return _read(
            "vllm-jsonl",
            [file],
            _options(
                {
                    "model": model,
                    "num_experts": num_experts,
                    "prompt_len": prompt_len,
                    "sequence_len": sequence_len,
                    "mend": mend,
                }
            ),
        )

    @classmethod
    @said_by_keyword()
    def from_sglang(
        cls,
        *files: _Path | Sequence[_Path],
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        sequence_len: _Counts | None = None,
        expert_map: _Path | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """Dumps of SGLang's expert distribution recorder in its mode per_token, a file for each rank.

        Slots become experts by the map of each dump, or by ``expert_map``. Tokens that a pass extends are prefill,
        those that it decodes are decode. Requests that were made one at a time, and whose positions do not tell them
        apart, need ``sequence_len``. No weights.
        """
        return _read(
            "sglang",
            _flat(files),
            _options(
                {
                    "model": model,
                    "num_experts": num_experts,
                    "top_k": top_k,
                    "sequence_len": sequence_len,
                    "expert_map": expert_map,
                    "mend": mend,
                }
            ),
        )

    @classmethod
    @said_by_keyword()
    def from_sglang_response(
        cls,
        source: _Path | Sequence[str],
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        prompt_len: _Counts | None = None,
        layers: _Counts | None = None,
        config: _Path | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """The ``routed_experts`` of SGLang or SGL-JAX: a file of responses, or a list of their base64 texts.

        A text is int32 [tokens, layers, k], whose ``layers`` and ``top_k``, or the ``config`` in place of both, must
        be said. Files say how many tokens the prompt has, which are prefill; texts need ``prompt_len``. No weights.
        """
        said = _options(
            {
                "model": model,
                "num_experts": num_experts,
                "top_k": top_k,
                "prompt_len": prompt_len,
                "layers": layers,
                "config": config,
                "mend": mend,
            }
        )
        if isinstance(source, str) and len(source) > _LONG and not _exists(source):
            raise TraceError(f"found one text of {len(source):,} letters, expected a path or a list of base64 texts")
        if isinstance(source, str | PathLike):
            return _read("sglang-response", [Path(source)], said)
        from perfmodel.routing.importers.sglang_response import from_texts

        return _in_memory("sglang-response", from_texts, source, said)

    @classmethod
    @said_by_keyword()
    def from_router_logits(
        cls,
        source: Any,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        prompt_len: _Counts | None = None,
        sequence_len: _Counts | None = None,
        layers: _Counts | None = None,
        family: str | None = None,
        config: _Path | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """Router logits of a Transformers model, by its family's own rule; needs ``family`` or ``config``.

        ``source`` is a file or a list of files, or what is in memory: the tuple ``router_logits`` of the model's
        output, float [tokens, experts] a layer, or a table with ``router_logits``, ``attention_mask`` and whatever
        else a file may hold. The first ``prompt_len`` tokens of a sequence are prefill. With weights.
        """
        said = _options(
            {
                "model": model,
                "num_experts": num_experts,
                "top_k": top_k,
                "prompt_len": prompt_len,
                "sequence_len": sequence_len,
                "layers": layers,
                "family": family,
                "config": config,
                "mend": mend,
            }
        )
        files = _paths(source)
        if files is not None:
            return _read("router-logits", files, said)
        from perfmodel.routing.importers.router_logits import from_arrays

        return _in_memory("router-logits", from_arrays, source, said)

    @classmethod
    @said_by_keyword()
    def from_llamacpp_csv(
        cls,
        file: _Path,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        prompt_len: _Counts | None = None,
        sequence_len: _Counts | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """A table ``layer_id,expert_ids`` of tools around llama.cpp, a row a token and layer.

        Calls of several tokens are prefill, calls of one are decode, unless ``sequence_len`` and ``prompt_len`` say
        better. No weights.
        """
        return _read(
            "llamacpp-csv",
            [file],
            _options(
                {
                    "model": model,
                    "num_experts": num_experts,
                    "top_k": top_k,
                    "prompt_len": prompt_len,
                    "sequence_len": sequence_len,
                    "mend": mend,
                }
            ),
        )

    @classmethod
    @said_by_keyword()
    def from_esft(
        cls,
        *files: _Path | Sequence[_Path],
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        prompt_len: _Counts | None = None,
        layers: _Counts | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """Expert scores of ESFT, a text file for each layer with a line for each sequence, or their folder.

        Needs ``top_k``. Everything is prefill unless ``prompt_len`` says where the prompts end. With weights.
        """
        return _read(
            "esft",
            _flat(files),
            _options(
                {
                    "model": model,
                    "num_experts": num_experts,
                    "top_k": top_k,
                    "prompt_len": prompt_len,
                    "layers": layers,
                    "mend": mend,
                }
            ),
        )

    @classmethod
    @said_by_keyword()
    def from_dynande(
        cls,
        *files: _Path | Sequence[_Path],
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        prompt_len: _Counts | None = None,
        sequence_len: _Counts | None = None,
        layers: _Counts | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """Scores of the DynaNDE simulator, a table of dense rows [tokens, experts] for each layer.

        The first ``prompt_len`` rows of a sequence are prefill. With weights.
        """
        return _read(
            "dynande",
            _flat(files),
            _options(
                {
                    "model": model,
                    "num_experts": num_experts,
                    "top_k": top_k,
                    "prompt_len": prompt_len,
                    "sequence_len": sequence_len,
                    "layers": layers,
                    "mend": mend,
                }
            ),
        )

    @classmethod
    @said_by_keyword()
    def from_router_trace(
        cls,
        file: _Path,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        prompt_len: _Counts | None = None,
        sequence_len: _Counts | None = None,
        layers: _Counts | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """A JSON document in the RouterTrace v2 schema, picks [tokens][layers][k].

        The first ``prompt_len`` rows of a sequence are prefill. No weights.
        """
        return _read(
            "router-trace-v2",
            [file],
            _options(
                {
                    "model": model,
                    "num_experts": num_experts,
                    "prompt_len": prompt_len,
                    "sequence_len": sequence_len,
                    "layers": layers,
                    "mend": mend,
                }
            ),
        )

    @classmethod
    @said_by_keyword()
    def from_row_phase(
        cls,
        file: _Path,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        mend: Iterable[str] | None = None,
    ) -> "RoutingTrace":
        """An ``.npz`` file with one row a token, ids [tokens, layers, k], and a sequence number and a phase beside it.

        Phases are those of the file; rows of unknown phase are left out.
        """
        return _read("row-phase", [file], _options({"model": model, "num_experts": num_experts, "mend": mend}))


def _options(said: dict[str, Any]) -> "ImportOptions":
    from perfmodel.routing.importers.options import options_of

    return options_of(said)


def _paths(source: Any) -> list[_Path] | None:
    """The files that are meant, or None where it is something else."""
    if isinstance(source, str | PathLike):
        return [Path(source)]
    several = isinstance(source, list | tuple) and source and all(isinstance(one, str | PathLike) for one in source)
    return [Path(one) for one in source] if several else None


def _flat(files: Sequence[_Path | Sequence[_Path]]) -> list[_Path]:
    """Paths that were given one after another, or in lists."""
    found: list[_Path] = []
    for file in files:
        found += file if isinstance(file, list | tuple) else [file]  # type: ignore[list-item]  # checked when read
    return found


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
