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
# # How many bits fit a latency target?
#
# Fewer bits for the experts near memory make tokens faster and the model worse. So does the number of experts that
# stay on the GPU at full precision, but the other way round, or so one would think. Given a latency target, which
# setting is the gentlest?

# %%
# %matplotlib inline
import perfmodel
from perfmodel import plots

TARGET = "tpot_p99_s <= 0.020"
workload = {"prompt": 128, "output": 512}

# %% [markdown]
# ## The choices
#
# Mean bits of the near-data experts from 1 to 4, and 0 to 8 experts a layer on the GPU. Both are options of the
# policy, and a sweep takes them like any hardware number.

# %%
sweep = perfmodel.sweep(
    policy="context-aware",
    axes={"policy.mean_bits": "1:4:13", "policy.gpu_experts": "0:8:9"},
    metrics=["tpot_mean_s", "tpot_p99_s", "gpu_memory_bytes", "quant_loss"],
    **workload,
).sel(policy="context-aware")
p99 = 1e3 * sweep["tpot_p99_s"].isel({"policy.mean_bits": slice(None, None, 4)})
print(p99.to_pandas().round(1).to_string())
print(sweep.attrs["infeasible"])

# %% [markdown]
# With 7 or 8 experts a layer the model does not fit the GPU. These points are empty, and the sweep says why.

# %%
plots.sweep_figure("heatmap", sweep, metric="tpot_p99_s")

# %% [markdown]
# More experts on the GPU are *not* faster throughout. A GPU expert is read at 16 bits, a near-data expert at few, and
# at 2 bits the near-data device is the faster of the two.
#
# ## The price in quality
#
# Latency alone would choose 1 bit. What do bits cost? The bundled loss table holds the output error of every expert
# at 1 to 4 bits, measured on the weights of this project's own small model. The metric `quant_loss` is the error of
# the pick at the width it runs at, averaged over the decode picks; an expert on the GPU has none. Take it as a
# ranking: how it translates into answers of a large model, this table cannot tell.

# %%
loss = 1e3 * sweep["quant_loss"].isel({"policy.mean_bits": slice(None, None, 4)})
print(loss.to_pandas().round(2).to_string())

# %% [markdown]
# ## The choice
#
# Settings that no other setting beats in latency and loss at once, from the fastest on:

# %%
front = perfmodel.pareto(sweep, minimise=["tpot_p99_s", "quant_loss"]).to_dataframe()
front["tpot_p99_ms"] = 1e3 * front["tpot_p99_s"]
print(front[["policy.mean_bits", "policy.gpu_experts", "tpot_p99_ms", "quant_loss"]].round(5).to_string())

# %%
chosen = front[front["tpot_p99_s"] <= 0.020].iloc[-1]
print(
    f"at most 20 ms for 99 % of the tokens: {chosen['policy.mean_bits']:g} bits,"
    f" {chosen['policy.gpu_experts']:g} experts a layer on the GPU ({chosen['tpot_p99_ms']:.1f} ms)"
)

# %% [markdown]
# Without a loss table, ask for the fastest setting of at least so many bits. `best` answers that, and says how close
# it came when there is none:

# %%
fastest = perfmodel.best(sweep, "tpot_p99_s", f"policy.mean_bits >= 3 and {TARGET}")
print(f"fastest of 3 bits or more: {fastest['policy.gpu_experts'].item()} experts a layer on the GPU")
try:
    perfmodel.best(sweep, "tpot_p99_s", f"policy.gpu_experts == 4 and {TARGET}")
except perfmodel.PerfModelError as error:
    print(error)

# %% [markdown]
# ## The other way round
#
# What would it take to keep 4 experts a layer, the published number, at 3 bits? `solve` finds the value of any axis
# at which a target is met.

# %%
four = perfmodel.Scenario.of(policy="context-aware:mean_bits=3,gpu_experts=4", **workload)
needed = perfmodel.solve(four, "gpu.memory_bandwidth_gb_per_s", "tpot_p99_ms=20", high=20000)
print(f"a GPU with {needed.value:.0f} {needed.unit} instead of {four.system.gpu.memory_bandwidth_gb_per_s:.0f}")

# %%
with_four = sweep["tpot_p99_s"].sel({"policy.gpu_experts": 4})
print(f"with 4 experts: {1e3 * float(with_four.min()):.1f} ms at the fewest bits")
assert (chosen["policy.mean_bits"], chosen["policy.gpu_experts"]) == (3, 2)
assert 1e3 * chosen["tpot_p99_s"] <= 20 < 1e3 * float(with_four.min())
assert fastest["policy.gpu_experts"].item() == 2

# %% [markdown]
# **Finding.** For 99 % of the tokens within 20 ms, the gentlest setting is 3 bits with 2 experts a layer on the GPU;
# with the published 4 no number of bits gets there, because the GPU, which reads its experts at full precision, is
# then the slower side.
