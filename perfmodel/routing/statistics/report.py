"""Statistics and their intervals, made of the sums that were kept while a trace was read."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.statistics.intervals import Bent, Bootstrap, of_resamples
from perfmodel.routing.statistics.ratios import divide, mean_known
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
from perfmodel.routing.statistics.tables import First, Plan, Second

_ROUNDS = 8
_DRAWS = 2048
_RECHOSEN = 200


class Statistics:
    """Makes every statistic of the sums of both passes."""

    def __init__(self, first: First, second: Second, bootstrap: Bootstrap, resamples: int) -> None:
        self.first, self.second = first, second
        self.plan: Plan = first.plan
        self.bootstrap, self.resamples = bootstrap, resamples
        self.file = self.plan.file
        self.notes: list[str] = []
        prefill = int(self.file.prompt_len.sum())
        self.rows: dict[Scope, int] = {
            "all": self.file.num_tokens,
            "prefill": prefill,
            "decode": self.file.num_tokens - prefill,
        }

    def survey(self, batches: NDArray[np.int64], min_decode: int, seed: int) -> Survey:
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
                prefill_tokens=self.rows["prefill"],
                decode_tokens=self.rows["decode"],
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
            hit_rates=self._hit_rates(seed),
            drift=self._drift(),
            cache=self._cache(),
            reference="prefill" if self.rows["prefill"] else "first half",
            resamples=self.resamples,
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
        experts = self.file.num_experts
        half = experts // 2 / experts
        bents = (Bent(half, 1.0 if experts > 1 else half, 2), Bent(0.0, 1 - 1 / experts, 2), Bent(1.0, 0.0, 1))
        top_half, gini_coefficient, evenness = self.bootstrap.layered_skew(_unevenness, bents, table)
        return Skew(
            picks=picks,
            shares=divide(picks, picks.sum(-1)),
            top_half=top_half,
            gini=gini_coefficient,
            entropy=evenness,
        )

    def _weights(self) -> Layered | None:
        if not self.file.has_weights:
            self.notes.append("the trace has no gate weights")
            return None
        ranks = np.arange(1, self.file.top_k + 1)
        least = np.where(ranks == 1, 1 / self.file.top_k, 0.0)
        return self.bootstrap.layered_ratio(self.first.weights, self.first.weighted, least, 1 / ranks)

    def _reuse(self, scope: Scope) -> Reuse:
        kinds = {"prefill": slice(0, 1), "decode": slice(1, 2), "all": slice(0, 3)}[scope]
        side = 2 if self._sides(scope) == slice(0, 2) else int(scope == "decode")
        ratio, first = self.bootstrap.layered_ratio, self.first
        return Reuse(
            measured=ratio(first.shared[:, :, kinds].sum(2), first.asked[:, :, kinds].sum(2)),
            chance=ratio(first.repeats[:, :, side], first.repeats_asked[:, :, side]),
        )

    def _distinct(self, scope: Scope) -> Layered:
        kind = {"prefill": 0, "decode": 1, "all": 2}[scope]
        parts = self.first.distinct[:, :, kind]
        whole = np.broadcast_to(self.first.whole[:, None, kind], parts.shape)
        most = np.minimum(self.plan.windows * self.file.top_k, self.file.num_experts)
        return self.bootstrap.layered_ratio(parts, whole, most=most)

    def _batches(self, sizes: NDArray[np.int64], seed: int) -> Batches | None:
        from perfmodel.kernels.tally import batch_distinct, drawn_distinct

        first, sequences = self.first, len(self.plan.sampled)
        sizes = sizes[sizes <= sequences]
        if len(sizes) == 0:
            return None
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(sequences) for _ in range(_ROUNDS)]
        layers, aligned = (np.full((self.file.num_layers, len(sizes)), np.nan) for _ in range(2))
        for i, size in enumerate(sizes):
            # Each order of all sequences is cut into batches, so that every sequence is used about as often.
            drawn = np.concatenate([order[: sequences // size * size].reshape(-1, size) for order in orders])
            freely = rng.random((_DRAWS, sequences)).argsort(axis=1)[:, :size]
            rows = rng.integers(0, first.sample_rows[freely])
            sums = np.zeros((2, self.file.num_layers), np.int64)
            count = drawn_distinct(first.sample, np.ascontiguousarray(freely), rows, self.file.num_experts, sums[0])
            steps = batch_distinct(first.sample, first.sample_rows, drawn, self.file.num_experts, sums[1])
            layers[:, i], aligned[:, i] = sums[0] / count, sums[1] / steps
        return Batches(sizes, layers.mean(0), layers, aligned.mean(0), aligned, sequences, self.plan.batch_steps)

    def _next_layer(self) -> NextLayer | None:
        if not self.plan.with_pairs:
            few = self.file.num_layers < 2 or self.file.num_sequences < 2
            self.notes.append(
                "the next layer is foretold only where there are at least two layers and two sequences"
                if few
                else "the next layer is not foretold: its table of pairs of experts would be too large"
            )
            return None
        ratio, second = self.bootstrap.layered_ratio, self.second
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
        own, uniform = (self.bootstrap.layered_ratio(second.cosines[..., i], second.compared) for i in (0, 2))
        # A layer in which only one prefill picks anything has no other sequence.
        others = self.first.directed > 1
        tables = [
            table * others
            for table in (second.cosines[..., 1], second.compared, second.chosen_cosines, second.choosing)
        ]
        other = Layered(
            self.bootstrap.paired_ratio(*(table.sum(1) for table in tables)), self.bootstrap.paired_ratio(*tables)
        )
        experts = self.file.num_experts
        below = np.cumsum(second.overlap, axis=-1)[:, :-1]
        places = second.compared.sum(1)[:, None] * np.arange(1, experts)
        return Similarity(own, other, uniform, self.bootstrap.ratio(below, places), added)

    def _hit_rates(self, seed: int) -> HitRates | None:
        first, second, ratio = self.first, self.second, self.bootstrap.ratio
        if not first.added or self.file.num_experts < 2:
            return None
        hits, layer_hits = np.cumsum(second.hits, axis=-1), second.layer_hits.copy()
        if first.added < 2:
            hits[:, 1:4] = layer_hits[..., 1:4] = np.nan
        names = ("own", "other_sequence", "static", "static_pooled", "oracle")
        rates = {name: ratio(hits[:, i], second.sequences) for i, name in enumerate(names)}
        layers = {name: ratio(layer_hits[..., i], second.layer_compared) for i, name in enumerate(names)}
        if first.added > 1:
            paired, choosers = self.bootstrap.paired_ratio, second.sequences
            rates["other_sequence"] = paired(hits[:, 1], choosers, np.cumsum(second.chosen_hits, axis=-1), choosers)
            layers["other_sequence"] = paired(
                layer_hits[..., 1],
                second.layer_compared,
                second.chosen_layer_hits,
                np.broadcast_to(choosers[:, None], second.layer_compared.shape),
            )
            self._rechoose(rates, layers, seed)
        return HitRates(
            gpu_experts=self.plan.capacities,
            uniform=self.plan.capacities / self.file.num_experts,
            layers=layers,
            sequences=first.added,
            **rates,
        )

    def _rechoose(self, rates: dict[str, Estimate], layers: dict[str, Estimate], seed: int) -> None:
        """Give the static placements intervals that let the profile change with its sequences."""
        from perfmodel.kernels import compare

        if self.resamples < 2:
            return
        if not self.plan.units:
            self.notes.append(
                "intervals of static hit rates hold the profile fixed: too many experts to choose it anew"
            )
            return
        # The tables of shares tell how many sequences there are.
        known = np.ascontiguousarray(self.first.kept[:, self.first.kept[0].any(axis=(1, 2))])
        shares = known.sum(-1) / compare.SHARE_UNIT
        sequences, by_layer = shares[0].sum(-1).round().astype(np.int64), shares[2].round().astype(np.int64)
        count = len(sequences)
        rng = np.random.default_rng(seed)
        resamples = min(self.resamples, _RECHOSEN)
        times = np.stack([np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(resamples)])
        times = times[(times > 0).sum(1) > 1]  # one alone has no others
        hits = np.zeros((len(times), 2, len(self.plan.capacities)))
        layer_hits = np.zeros((len(times), 2, self.file.num_layers))
        compare.static_resampled(known, self.plan.slot, sequences, by_layer, times, hits, layer_hits)
        for i, name in enumerate(("static", "static_pooled")):
            rates[name] = of_resamples(rates[name].value, np.cumsum(hits[:, i], axis=-1), count)
            layers[name] = of_resamples(layers[name].value, layer_hits[:, i], (by_layer > 0).sum(0))

    def _drift(self) -> Drift | None:
        windows, second, ratio = self.plan.drift_windows, self.second, self.bootstrap.ratio
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
            return self.bootstrap.ratio(np.cumsum(table, axis=-1)[:, :-1], table.sum(-1))

        def by_layer(table: NDArray[Any]) -> Floats:
            return divide(np.cumsum(table, axis=-1)[:, :-1], table.sum(-1))

        lengths, prompts, rows = self.file.sequence_lengths, self.file.prompt_len, self.file.block_rows
        restarted = int(((lengths > prompts) & (prompts // rows != (lengths - 1) // rows)).sum())
        if restarted:
            self.notes.append(
                f"caches start empty again after every {rows} rows of a sequence, in {restarted} "
                f"decode{'s' if restarted > 1 else ''}"
            )
        return CacheCurves(
            curve(first.lru),
            curve(first.belady),
            by_layer(first.lru_layers),
            by_layer(first.belady_layers),
            rows,
        )


def _unevenness(counts: Floats) -> tuple[Floats, ...]:
    """Of counts [R, L, E], three measures: each its mean over layers [R], and that of each layer [R, L]."""
    ordered = np.sort(counts, axis=-1)  # once, as they sort too
    by_layer = [measure(ordered) for measure in (top_share, gini, entropy)]
    return tuple(part for found in by_layer for part in (mean_known(found, 1), found))
