"""Frequency profiles from what other tools write: one class method a layout, the work being its importer's."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from perfmodel.routing.keywords import said_by_keyword

if TYPE_CHECKING:
    from perfmodel.routing.importers.base import ImportOptions
    from perfmodel.routing.profile import FrequencyProfile

_Path = str | Path


class ProfileFormats:
    """The ``from_*`` methods of :class:`perfmodel.routing.profile.FrequencyProfile`.

    ``model`` (name), ``num_experts`` (experts a layer), ``top_k`` (picks of a token), ``layers`` (model layer of each
    row, increasing) and ``expert_map`` (file with the expert of every slot [layers, slots]) say what a layout leaves
    open. Files are paths, one after another or in a list. Counts have no phases unless a layout says so. All raise
    :class:`TraceError` for what breaks the layout or an option.
    """

    @classmethod
    @said_by_keyword()
    def from_imatrix(
        cls,
        *files: _Path | Sequence[_Path],
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
    ) -> "FrequencyProfile":
        """Counts of llama.cpp importance matrices (GGUF) of one model, added.

        All of it is prefill.
        """
        said = _options({"model": model, "num_experts": num_experts, "top_k": top_k})
        return _read("imatrix", _flat(files), said)

    @classmethod
    @said_by_keyword()
    def from_moe_infinity(
        cls,
        source: _Path | ArrayLike,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> "FrequencyProfile":
        """A collection of MoE-Infinity, a file or counts [sequences, layers, experts], added over its sequences.

        Prefill and decode are counted together.
        """
        said = _options({"model": model, "num_experts": num_experts, "top_k": top_k, "layers": layers})
        if isinstance(source, str | PathLike):
            return _read("moe-infinity", [Path(source)], said)
        from perfmodel.routing.importers.moe_infinity import from_matrices  # imported here, for it makes profiles

        return _profile(from_matrices(source, said))

    @classmethod
    @said_by_keyword()
    def from_tensorrt_llm(
        cls,
        folder: _Path,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
    ) -> "FrequencyProfile":
        """Expert statistics of TensorRT-LLM, a folder of counts [experts] by iteration, layer and rank, added.

        Phases are counted together.
        """
        said = _options({"model": model, "num_experts": num_experts, "top_k": top_k})
        return _read("tensorrt-llm", [folder], said)

    @classmethod
    @said_by_keyword()
    def from_ktransformers(
        cls,
        source: _Path | ArrayLike,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> "FrequencyProfile":
        """An activation table of KTransformers, a file or numbers [layers, experts]; or any such table of shares.

        Phases are those that the numbers are of, which nothing tells.
        """
        said = _options({"model": model, "num_experts": num_experts, "top_k": top_k, "layers": layers})
        if isinstance(source, str | PathLike):
            return _read("ktransformers", [Path(source)], said)
        from perfmodel.routing.importers.counts import profile_of

        return _profile(profile_of("ktransformers", (), said, source))

    @classmethod
    @said_by_keyword()
    def from_sglang_stat(
        cls,
        *files: _Path | Sequence[_Path],
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
        expert_map: _Path | None = None,
    ) -> "FrequencyProfile":
        """Counts of SGLang's expert distribution recorder in its modes stat, stat_approx and per_pass, added.

        Phases are counted together.
        """
        said = _options(
            {"model": model, "num_experts": num_experts, "top_k": top_k, "layers": layers, "expert_map": expert_map}
        )
        return _read("sglang-stat", _flat(files), said)

    @classmethod
    @said_by_keyword()
    def from_popularity_rank(
        cls,
        source: _Path | Iterable[tuple[int, int]],
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
    ) -> "FrequencyProfile":
        """Experts as (layer, expert) from the most to the least used, from a file or in memory: an order alone.

        Nothing is known of phases.
        """
        said = _options({"model": model, "num_experts": num_experts, "top_k": top_k})
        if isinstance(source, str | PathLike):
            return _read("popularity-rank", [Path(source)], said)
        from perfmodel.routing.importers.popularity_rank import from_pairs

        return _profile(from_pairs(source, said))


def _options(said: dict[str, Any]) -> "ImportOptions":
    from perfmodel.routing.importers.options import options_of

    return options_of(said)


def _flat(files: Sequence[_Path | Sequence[_Path]]) -> list[_Path]:
    """Paths that were given one after another, or in lists."""
    found: list[_Path] = []
    for file in files:
        found += file if isinstance(file, list | tuple) else [file]  # type: ignore[list-item]  # checked when read
    return found


def _read(format_name: str, files: Sequence[_Path], options: "ImportOptions") -> "FrequencyProfile":
    from perfmodel.routing.importers import import_files

    return _profile(import_files(format_name, files, options))


def _profile(imported: Any) -> "FrequencyProfile":
    from perfmodel.routing.profile import FrequencyProfile

    assert isinstance(imported.result, FrequencyProfile)
    return imported.result
