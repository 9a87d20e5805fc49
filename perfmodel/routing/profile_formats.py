"""Frequency profiles from what other tools write: one class method a layout, the work being its importer's."""

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from perfmodel.routing.profile import FrequencyProfile

_Path = str | Path


class ProfileFormats:
    """The ``from_*`` methods of :class:`perfmodel.routing.profile.FrequencyProfile`.

    ``model`` (name), ``num_experts`` (experts a layer), ``top_k`` (picks of a token) and ``layers`` (model layer of
    each row) say what a layout leaves open. All raise :class:`TraceError` for what breaks the layout.
    """

    @classmethod
    def from_imatrix(
        cls, *files: _Path, model: str | None = None, num_experts: int | None = None, top_k: int | None = None
    ) -> "FrequencyProfile":
        """Counts of llama.cpp importance matrices (GGUF) of one model, added."""
        return _read("imatrix", files, model=model, num_experts=num_experts, top_k=top_k)

    @classmethod
    def from_moe_infinity(
        cls,
        source: _Path | ArrayLike,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> "FrequencyProfile":
        """A collection of MoE-Infinity, a file or counts [sequences, layers, experts], added over its sequences."""
        said = {"model": model, "num_experts": num_experts, "top_k": top_k, "layers": layers}
        if isinstance(source, str | PathLike):
            return _read("moe-infinity", [Path(source)], **said)
        from perfmodel.routing.importers.moe_infinity import from_matrices  # imported here, for it makes profiles

        return _profile(from_matrices(source, _options(said)))

    @classmethod
    def from_tensorrt_llm(
        cls, folder: _Path, *, model: str | None = None, num_experts: int | None = None, top_k: int | None = None
    ) -> "FrequencyProfile":
        """Expert statistics of TensorRT-LLM, added over iterations and ranks."""
        return _read("tensorrt-llm", [folder], model=model, num_experts=num_experts, top_k=top_k)

    @classmethod
    def from_ktransformers(
        cls,
        source: _Path | ArrayLike,
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> "FrequencyProfile":
        """An activation table of KTransformers, a file or numbers [layers, experts]; or any such table of shares."""
        said = {"model": model, "num_experts": num_experts, "top_k": top_k, "layers": layers}
        if isinstance(source, str | PathLike):
            return _read("ktransformers", [Path(source)], **said)
        from perfmodel.routing.importers.counts import profile_of

        return _profile(profile_of("ktransformers", (), _options(said), source))

    @classmethod
    def from_sglang_stat(
        cls,
        *files: _Path,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        layers: Sequence[int] | None = None,
    ) -> "FrequencyProfile":
        """Counts of SGLang's expert distribution recorder in its modes stat and stat_approx."""
        return _read("sglang-stat", files, model=model, num_experts=num_experts, top_k=top_k, layers=layers)

    @classmethod
    def from_popularity_rank(
        cls,
        source: _Path | Iterable[tuple[int, int]],
        *,
        model: str | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
    ) -> "FrequencyProfile":
        """Experts as (layer, expert) from the most to the least used, from a file or in memory: an order alone."""
        said = {"model": model, "num_experts": num_experts, "top_k": top_k}
        if isinstance(source, str | PathLike):
            return _read("popularity-rank", [Path(source)], **said)
        from perfmodel.routing.importers.popularity_rank import from_pairs

        return _profile(from_pairs(source, _options(said)))


def _options(said: dict[str, Any]) -> Any:
    from perfmodel.routing.importers.base import ImportOptions

    layers = said.get("layers")
    return ImportOptions(**{**said, "layers": None if layers is None else tuple(layers)})


def _read(format_name: str, files: Sequence[_Path], **said: Any) -> "FrequencyProfile":
    from perfmodel.routing.importers import import_files

    return _profile(import_files(format_name, files, _options(said)))


def _profile(imported: Any) -> "FrequencyProfile":
    from perfmodel.routing.profile import FrequencyProfile

    assert isinstance(imported.result, FrequencyProfile)
    return imported.result
