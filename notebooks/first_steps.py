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
# # First steps
#
# A Mixture-of-Experts model picks a few of its experts for every token. When they do not all fit in GPU memory, the
# others wait somewhere else: behind a link, or in memory that can compute by itself (near-data processing, NDP). What
# a token then costs depends on the machine, on the policy that decides who runs which expert, and on which experts
# the tokens really pick. `perfmodel` computes it from a *recorded* routing trace.
#
# This notebook prices one case, then many machines at once, and draws them. Open it with Jupyter, or run the `.py`
# file as a script.

# %%
# %matplotlib inline
import tempfile
from pathlib import Path

import perfmodel
from perfmodel import plots

# %% [markdown]
# ## One model, one machine, one policy
#
# Model, system and trace are names of bundled files here; each may be the path of your own (a Hugging Face
# `config.json`, a TOML file, an `.npz`). The machine is an H100 with a near-data device behind a CXL 2.0 link. The
# policy is the context-aware one: the experts that the prompt used most go to the GPU, the others stay near memory at
# 3 bits on average.

# %%
MODEL, SYSTEM, TRACE = "mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini"
one = perfmodel.evaluate(MODEL, SYSTEM, TRACE, "context-aware:mean_bits=3", prompt=128, output=512)
print(f"decode rate            {one.decode_tok_per_s:6.1f} tok/s")
print(f"time per output token  {1e3 * one.tpot_mean_s:6.1f} ms, P99 {1e3 * one.tpot_p99_s:.1f} ms")
print(f"time to first token    {one.ttft_s:6.2f} s")
print(f"hit rate               {one.hit_rate.own:6.1%} of picks find their expert on the GPU")
print(f"most time goes to      {one.binding_resource}")
print(f"weakest evidence       {one.weakest_source}: the weakest source among the hardware constants")

# %% [markdown]
# The last line matters: every constant carries its source, and an answer is as good as the weakest of them.
# `perfmodel specs show h100-cxl2-ndp` lists all.
#
# ## Many machines at once
#
# A sweep prices every combination of axis values. An axis is any number of the system, any option of a policy, or the
# workload. `"16:450:25:log"` means 25 values from 16 to 450, evenly spaced in the logarithm: from a slow PCIe slot to
# NVLink-C2C. MoNDE and HOBBIT are the published systems that the context-aware one is compared with.

# %%
sweep = perfmodel.sweep(
    MODEL,
    SYSTEM,
    TRACE,
    policy=["monde", "hobbit", "context-aware:mean_bits=3"],
    axes={"link.bandwidth_gb_per_s": "16:450:25:log"},
    metrics=["tpot_mean_s", "decode_tok_per_s"],
    prompt=128,
    output=512,
)
rates = sweep["decode_tok_per_s"]
print(dict(sweep.sizes))
print(rates.isel({"link.bandwidth_gb_per_s": slice(None, None, 6)}).to_pandas().T.round(2).to_string())

# %% [markdown]
# The result is an `xarray.Dataset`: axes by name, units in the attributes, and where everything came from, down to
# the hashes of the inputs and the command that computes it again.

# %%
print(rates.attrs["units"], "|", rates.attrs["long_name"])
print(sweep.attrs["command"])

# %% [markdown]
# ## A figure
#
# Every kind of figure is one call; `plots.KINDS` lists them. The caption says what was held fixed and what the
# numbers rest on.

# %%
plots.sweep_figure("speedup", sweep, baseline="monde")

# %% [markdown]
# ## Keep it
#
# Saved as netCDF (or Zarr, CSV, Parquet), a sweep keeps its units and its provenance.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "links.nc"
    sweep.to_netcdf(path, engine="h5netcdf")
    assert perfmodel.open_dataset(path).identical(sweep)
best = perfmodel.best(sweep, "decode_tok_per_s")
print("best point:", best["policy"].item(), f"at {best['link.bandwidth_gb_per_s'].item():g} GB/s")

# %% [markdown]
# ## What it says
#
# How much does each system gain from the fastest link over the slowest?

# %%
slowest, fastest = rates.isel({"link.bandwidth_gb_per_s": 0}), rates.isel({"link.bandwidth_gb_per_s": -1})
gain = (fastest / slowest).to_series()
print(gain.round(4).to_string())
assert (float(rates["link.bandwidth_gb_per_s"][0]), float(rates["link.bandwidth_gb_per_s"][-1])) == (16, 450)
assert round(gain["monde"], 1) == 12.5
assert round(gain["hobbit"], 1) == 19.1
assert 0 < 100 * (gain["context-aware:mean_bits=3"] - 1) < 0.1

# %% [markdown]
# **Finding.** From a link of 16 GB/s to one of 450 GB/s, MoNDE decodes 12.5 times and HOBBIT 19.1 times as fast,
# while the context-aware system gains less than 0.1 %, because only activations cross its link while it decodes.
