"""Every routing statistic of a trace at once, with intervals, in memory that does not grow with its length."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import TraceError
from perfmodel.routing.blocks import TraceFile, open_trace
from perfmodel.routing.checks import as_count
from perfmodel.routing.npz import shown
from perfmodel.routing.statistics.ratios import divide, mean_known
from perfmodel.routing.statistics.resample import Resampler
from perfmodel.routing.statistics.results import (
    Batches,
    CacheCurves,
    Contents,
    Drift,
    Estimate,
    Floats,
    HitRates,
    Layered,
    NextLayer,
    Reuse,
    Scope,
    Similarity,
    Skew,
    Survey,
)
from perfmodel.routing.statistics.skew import entropy, gini, top_share
from perfmodel.routing.statistics.tables import First, Plan, Second, make_plan
from perfmodel.routing.trace import RoutingTrace

LAGS = (1, 2, 4, 8, 16, 32)
WINDOWS = (2, 8, 32, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MAX_LAG = 64
MAX_RESAMPLES = 100_000
_ROUNDS = 8


def survey(
    source: str | Path | RoutingTrace | TraceFile,
    *,
    lags: Iterable[int] = LAGS,
    windows: Iterable[int] = WINDOWS,
    batches: Iterable[int] = BATCHES,
    min_decode: int = 16,
    resamples: int = 1000,
    seed: int = 0,
) -> Survey:
    """Find every routing statistic of a trace.

    Rows are read block by block, twice after they were checked, so a trace may be larger than memory.

    Parameters
    ----------
    source : what :func:`perfmodel.routing.blocks.open_trace` takes
    lags : distances of rows whose reuse is measured, 1 to 64
    windows : rows of the windows in which distinct experts are counted
    batches : sequences that decode side by side, 1 to 64; more than there are is left out
    min_decode : decode rows that a sequence needs to be compared with its prefill: with fewer, whatever it picked
        looks like what it prefers
    resamples : draws of sequences behind each interval, 0 for none
    seed : of those draws and of the batches

    Raises :class:`TraceError` for a trace or a number that is not allowed.
    """
    chosen = _numbers("lags", lags, MAX_LAG), _numbers("windows", windows, None), _numbers("batches", batches, 64)
    min_decode = as_count("min_decode", min_decode, 1, None)
    resamples = as_count("resamples", resamples, 0, MAX_RESAMPLES)
    seed = as_count("seed", seed, 0, 2**63 - 1)
    file = open_trace(source)
    plan = make_plan(file, chosen[0], chosen[1], min_decode, seed)
    first = First(plan)
    for block in file.blocks(weights=True):
        first.add(block)
    second = Second(plan, first)
    if first.added or plan.drift_windows or plan.with_pairs:
        for block in file.blocks():
            second.add(block)
    return _Report(first, second, Resampler(plan.groups, resamples, seed)).survey(
        chosen[2], min_decode, resamples, seed
    )


def _numbers(name: str, values: Iterable[int], highest: int | None) -> NDArray[np.int64]:
    """Distinct numbers from 1 on, in rising order."""
    try:
        listed = list(values)
    except TypeError as error:
        raise TraceError(f"{name} is {shown(values)}, expected a list of integers >= 1") from error
    if not listed or len(listed) > 1000:
        raise TraceError(f"{name} has {len(listed)} entries, expected 1 to 1000")
    return np.array(sorted({as_count(name, one, 1, highest or 2**40) for one in listed}), np.int64)


class _Report:
    """Makes statistics of the sums of both passes."""

    def __init__(self, first: First, second: Second, resampler: Resampler) -> None:
        self.first, self.second, self.resampler = first, second, resampler
        self.plan: Plan = first.plan
        self.file = self.plan.file
        self.notes: list[str] = []
        prefill = int(self.file.prompt_len.sum())
        self.rows: dict[Scope, int] = {
            "all": self.file.num_tokens,
            "prefill": prefill,
            "decode": self.file.num_tokens - prefill,
        }

    def survey(self, batches: NDArray[np.int64], min_decode: int, resamples: int, seed: int) -> Survey:
        """All of them."""
        plan, file = self.plan, self.file
        scopes: list[Scope] = [scope for scope, rows in self.rows.items() if rows]
        if not self.rows["prefill"]:
            self.notes.append("no sequence has a prefill: its first half stands in for it where decode is compared")
        if not self.rows["decode"]:
            self.notes.append("no sequence has decode rows: no batches, no caches, nothing to compare a prefill with")
        if plan.groups < file.num_sequences:
            self.notes.append(f"{file.num_sequences} sequences are resampled in {plan.groups} random groups")
        if file.num_sequences < 2:
            self.notes.append("a single sequence: no intervals, no other sequences to compare with")
        return Survey(
            contents=Contents(
                model=file.metadata["model"],
                source=file.metadata["source"],
                sequences=file.num_sequences,
                prefill_rows=self.rows["prefill"],
                decode_rows=self.rows["decode"],
                num_experts=file.num_experts,
                top_k=file.top_k,
                layer_index=file.layer_index,
                metadata=dict(file.metadata),
            ),
            skew={scope: self._skew(scope) for scope in scopes},
            weights=self._weights(),
            lags=plan.lags,
            reuse={scope: self._reuse(scope) for scope in scopes},
            windows=plan.windows,
            distinct={scope: self._distinct(scope) for scope in scopes},
            batches=self._batches(batches, seed),
            next_layer=self._next_layer(),
            similarity=self._similarity(min_decode),
            hit_rates=self._hit_rates(),
            drift=self._drift(),
            cache=self._cache(),
            reference="prefill" if self.rows["prefill"] else "first half",
            resamples=resamples,
            groups=plan.groups,
            seed=seed,
            min_decode=min_decode,
            notes=tuple(self.notes),
        )

    def _sides(self, scope: Scope) -> slice:
        """Which of the tables of rows before and after the split make up a scope."""
        if scope == "all" or not self.rows["prefill"]:
            return slice(0, 2)
        return slice(0, 1) if scope == "prefill" else slice(1, 2)

    def _skew(self, scope: Scope) -> Skew:
        table = self.first.picks[:, self._sides(scope)].sum(1)
        picks = table.sum(0)
        found = self.resampler.estimates(_unevenness, table)
        return Skew(
            picks=picks,
            shares=divide(picks, picks.sum(-1)),
            top_half=Layered(*found[:2]),
            gini=Layered(*found[2:4]),
            entropy=Layered(*found[4:]),
        )

    def _weights(self) -> Layered | None:
        if not self.file.has_weights:
            self.notes.append("the trace has no gate weights")
            return None
        return self.resampler.layered_ratio(self.first.weights, self.first.weighted)

    def _reuse(self, scope: Scope) -> Reuse:
        kinds = {"prefill": slice(0, 1), "decode": slice(1, 2), "all": slice(0, 3)}[scope]
        side = 2 if self._sides(scope) == slice(0, 2) else int(scope == "decode")
        ratio, first = self.resampler.layered_ratio, self.first
        return Reuse(
            measured=ratio(first.shared[:, :, kinds].sum(2), first.asked[:, :, kinds].sum(2)),
            chance=ratio(first.repeats[:, :, side], first.repeats_asked[:, :, side]),
        )

    def _distinct(self, scope: Scope) -> Layered:
        kind = {"prefill": 0, "decode": 1, "all": 2}[scope]
        parts = self.first.distinct[:, :, kind]
        whole = np.broadcast_to(self.first.whole[:, None, kind], parts.shape)
        return self.resampler.layered_ratio(parts, whole)

    def _batches(self, sizes: NDArray[np.int64], seed: int) -> Batches | None:
        from perfmodel.kernels.tally import batch_distinct

        first, sequences = self.first, len(self.plan.sampled)
        sizes = sizes[sizes <= sequences]
        if len(sizes) == 0:
            return None
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(sequences) for _ in range(_ROUNDS)]
        layers = np.full((self.file.num_layers, len(sizes)), np.nan)
        for i, size in enumerate(sizes):
            # Each order of all sequences is cut into batches, so that every sequence is used about as often.
            drawn = np.concatenate([order[: sequences // size * size].reshape(-1, size) for order in orders])
            sums = np.zeros(self.file.num_layers, np.int64)
            steps = batch_distinct(first.sample, first.sample_rows, drawn, self.file.num_experts, sums)
            layers[:, i] = sums / steps
        return Batches(sizes, layers.mean(0), layers, sequences, self.plan.batch_steps)

    def _next_layer(self) -> NextLayer | None:
        if not self.plan.with_pairs:
            few = self.file.num_layers < 2 or self.file.num_sequences < 2
            self.notes.append(
                "the next layer is foretold only where there are at least two layers and two sequences"
                if few
                else "the next layer is not foretold: its table of pairs of experts would be too large"
            )
            return None
        ratio, second = self.resampler.layered_ratio, self.second
        return NextLayer(*(ratio(second.found[..., way], second.found_asked) for way in (0, 1)))

    def _similarity(self, min_decode: int) -> Similarity | None:
        added, second = self.first.added, self.second
        if not added:
            self.notes.append(
                f"no sequence has a prefill and at least {min_decode} decode rows: no similarity, no hit rates"
            )
            return None
        left_out = self.file.num_sequences - added
        if left_out:
            self.notes.append(
                f"{left_out} of {self.file.num_sequences} sequences have no prefill or fewer than {min_decode} decode "
                "rows and are left out of similarity and hit rates"
            )
        cosines = second.cosines.copy()
        cosines[:, self.first.directed < 2, 1] = np.nan
        own, other, uniform = (self.resampler.layered_ratio(cosines[..., i], second.compared) for i in range(3))
        experts = self.file.num_experts
        below = np.cumsum(second.overlap, axis=-1)[:, :-1]
        places = second.compared.sum(1)[:, None] * np.arange(1, experts)
        return Similarity(own, other, uniform, self.resampler.ratio(below, places), added)

    def _hit_rates(self) -> HitRates | None:
        first, second, ratio = self.first, self.second, self.resampler.ratio
        if not first.added or self.file.num_experts < 2:
            return None
        hits, layer_hits = np.cumsum(second.hits, axis=-1), second.layer_hits.copy()
        if first.added < 2:
            hits[:, 1:4] = layer_hits[..., 1:4] = np.nan
        names = ("own", "other_sequence", "static", "static_pooled", "oracle")
        rates = {name: ratio(hits[:, i], second.sequences) for i, name in enumerate(names)}
        return HitRates(
            gpu_experts=self.plan.capacities,
            uniform=self.plan.capacities / self.file.num_experts,
            layers={name: ratio(layer_hits[..., i], second.layer_compared) for i, name in enumerate(names)},
            sequences=first.added,
            **rates,
        )

    def _drift(self) -> Drift | None:
        windows, second, ratio = self.plan.drift_windows, self.second, self.resampler.ratio
        if not windows:
            return None
        rows, comparable = self.plan.drift_rows, self.plan.comparable
        if int((self.file.sequence_lengths - self.plan.splits)[comparable].max()) // rows > windows:
            self.notes.append(f"drift is followed over the first {windows * rows} rows of the output")
        return Drift(
            first_row=np.arange(windows) * rows,
            rows=rows,
            cosine=ratio(second.drift_cosines, second.drift_compared),
            hit_rate=ratio(second.drift_hits, second.drift_picks),
            sequences=second.drift_sequences,
        )

    def _cache(self) -> CacheCurves | None:
        first = self.first
        if not self.rows["decode"]:
            return None

        def curve(table: NDArray[Any]) -> Estimate:
            return self.resampler.ratio(np.cumsum(table, axis=-1)[:, :-1], table.sum(-1))

        def by_layer(table: NDArray[Any]) -> Floats:
            return divide(np.cumsum(table, axis=-1)[:, :-1], table.sum(-1))

        return CacheCurves(
            curve(first.lru),
            curve(first.belady),
            by_layer(first.lru_layers),
            by_layer(first.belady_layers),
            self.file.block_rows,
        )


def _unevenness(counts: Floats) -> tuple[Floats, ...]:
    """Of counts [R, L, E], three measures: each its mean over layers [R], and that of each layer [R, L]."""
    ordered = np.sort(counts, axis=-1)  # once, as they sort too
    by_layer = [measure(ordered) for measure in (top_share, gini, entropy)]
    return tuple(part for found in by_layer for part in (mean_known(found, 1), found))
