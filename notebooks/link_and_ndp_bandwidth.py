# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Link and near-data bandwidth: who wins where?
#
# An expert that is not on the GPU can be copied over the link and run there (HOBBIT), or run where it lies, by a
# device near its memory (NDP), at fewer bits. A faster link helps the first, faster near-data memory the second.
# Where is the line between them?

# %%
# %matplotlib inline
import numpy as np

import perfmodel
from perfmodel import plots

# %% [markdown]
# ## The map
#
# 40 link bandwidths times 40 bandwidths of the near-data DRAM, for both systems: 3,200 points. The ranges reach from
# PCIe 3 to NVLink-C2C, and from a single DRAM channel to the 512 GB/s of the bundled device (of which it gets 40 %,
# since it reads row by row).

# %%
OURS, HOBBIT = "context-aware:mean_bits=3", "hobbit"
workload = {"prompt": 128, "output": 512}
sweep = perfmodel.sweep(
    policy=[HOBBIT, OURS],
    axes={"link.bandwidth_gb_per_s": "16:450:40:log", "ndp.dram_bandwidth_gb_per_s": "2:512:40:log"},
    **workload,
)
speed_up = sweep["tpot_mean_s"].sel(policy=HOBBIT) / sweep["tpot_mean_s"].sel(policy=OURS)
print(f"{speed_up.size} machines, speed-up from {float(speed_up.min()):.2f} to {float(speed_up.max()):.0f}")

# %%
plots.sweep_figure("heatmap", sweep, baseline=HOBBIT)

# %% [markdown]
# ## The line
#
# The contour of the map is drawn between grid points. `break_even` finds the line itself: for each link, the
# near-data bandwidth at which both systems take equally long, closed in on with the model until they agree within
# 1e-9.

# %%
LINKS = [16, 32, 64, 128, 256, 450]


def line(ours: str, other: str) -> np.ndarray:
    """Near-data bandwidth [GB/s] from which ``ours`` is faster, for each of the links."""
    found = perfmodel.break_even(
        perfmodel.Scenario.of(policy=[ours, other], **workload),
        ("ndp.dram_bandwidth_gb_per_s", 0.5, 5000),
        along=("link.bandwidth_gb_per_s", LINKS),
    )
    assert (found["after"] == ours).all()
    return found["break_even"].isel(crossing=0).values


published = line(OURS, HOBBIT)
for link, value in zip(LINKS, published, strict=True):
    print(f"link {link:4} GB/s: from {value:6.1f} GB/s near-data DRAM on, {value / link:.2f} of the link")

# %% [markdown]
# ## Is that fair to HOBBIT?
#
# As published, HOBBIT copies a fixed share of the picks and keeps nothing. Let it keep 4 experts a layer on the GPU,
# as many as the context-aware system does, and copy 96 % of the others one layer ahead. And MoNDE? It runs its
# experts near memory as well, at full precision, so there is no line against it: it loses at every bandwidth.

# %%
BETTER = "hobbit:cache_high=4,prefetch_accuracy=0.96"
better = line(OURS, BETTER)
print(f"{'link [GB/s]':34}", *(f"{link:7}" for link in LINKS))
for name, values in {"HOBBIT as published": published, "HOBBIT with cache and prefetch": better}.items():
    print(f"{name:34}", *(f"{value:7.1f}" for value in values))
monde = perfmodel.break_even(
    perfmodel.Scenario.of(policy=[OURS, "monde"], **workload), ("ndp.dram_bandwidth_gb_per_s", 0.5, 5000)
)
print("against MoNDE:", monde["winner"].item(), "wins all along")

# %%
fair = perfmodel.sweep(
    policy=[BETTER, OURS],
    axes={"link.bandwidth_gb_per_s": "16:450:40:log", "ndp.dram_bandwidth_gb_per_s": "2:512:40:log"},
    **workload,
)
plots.sweep_figure("heatmap", fair, baseline=BETTER)

# %%
shares, better_shares = published / LINKS, better / LINKS
print("share of the link:", shares.round(2), better_shares.round(2))
assert (round(shares.min(), 2), round(shares.max(), 2)) == (0.18, 0.21)
assert (round(better_shares.min(), 2), round(better_shares.max(), 2)) == (0.55, 0.57)
assert "mean_bits=3" in OURS
assert (LINKS[0], LINKS[-1]) == (16, 450)
assert monde["winner"].item() == OURS

# %% [markdown]
# **Finding.** Near-data processing at 3 bits overtakes HOBBIT as soon as its DRAM has 0.18 to 0.21 of the link's
# bandwidth, and 0.55 to 0.57 of it once HOBBIT caches and prefetches, over the whole range from 16 to 450 GB/s.
