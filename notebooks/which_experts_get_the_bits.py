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
# # Which experts should get the bits?
#
# The context-aware system gives its near-data experts 2 or 3 bits on average, and more to the important ones: bits
# fall along the order of importance, and the summed loss is as small as that allows. Does the order pay? That is a
# question to the loss table, so ask it.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np

import perfmodel
from perfmodel.bitwidth import assigned_loss, objective_weights
from perfmodel.placement import importance

table = perfmodel.LossTable.load("tiny-mixtral-32l-losses")
trace = perfmodel.RoutingTrace.load("tiny-mixtral-32l-mini")
order = importance(trace).values  # [sequences, layers, experts], from each prompt
print(f"{table.num_layers} layers x {table.num_experts} experts, {len(order)} sequences, widths {table.bits}")

# %% [markdown]
# ## The price of the order
#
# For every sequence and layer: the loss of three assignments of the same budget, over that of the best one there is.
# All 8 experts near memory, 2 and 3 bits on average.


# %%
def over_optimum(bits: float, weights: np.ndarray | None, rank: np.ndarray) -> float:
    """Mean over sequences and layers of the prefix rule's loss along an order, over the optimum's."""
    chosen = perfmodel.select_bitwidths(rank, table.losses, bits, weights=weights)
    best = perfmodel.optimal_bitwidths(table.losses, bits, weights=np.ones_like(order) if weights is None else weights)
    lost, least = (assigned_loss(table.losses, one, weights=weights) for one in (chosen, best))
    return float((lost / least).mean())


chance = np.random.default_rng(0).random(order.shape)
ratios = {}
for bits in (2, 3):
    for objective in ("plain", "importance"):
        weights = objective_weights(objective, importance=order)
        own, random = over_optimum(bits, weights, order), over_optimum(bits, weights, chance)
        ratios[bits, objective] = own, random
        print(f"{bits} bits, {objective:10s} order {own:.3f}, random {random:.3f}")

# %% [markdown]
# Under the plain sum, which is what the paper states, the order of importance is no better than a random one, and at
# 3 bits neither matters: equal bits are the optimum. A loss that is weighted by importance is another matter.
#
# ## Where the losses are
#
# Layers differ far more than the experts of one layer, and one budget for the whole model can use that. Every budget
# at once, for the plain sum:

# %%
fronts = {scope: perfmodel.bitwidth_front(table.losses, scope=scope) for scope in ("layer", "model")}
by_layer = fronts["layer"].loss.sum(axis=0)
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.semilogy(fronts["layer"].mean_bits[0], by_layer, label="one budget a layer")
axes.semilogy(fronts["model"].mean_bits, fronts["model"].loss, label="one budget for the model")
axes.set(xlabel="mean bits of an expert (bit)", ylabel="summed loss of the optimum (MSE, log)")
axes.legend(frameon=False)
at_two = by_layer[fronts["layer"].step_within(2)[0]], fronts["model"].loss[fronts["model"].step_within(2)]
print(f"at 2 bits one budget for the model lowers the summed loss {at_two[0] / at_two[1]:.2f} times")

# %% [markdown]
# ## What decode pays
#
# The sums above are over experts. What counts is what the decode steps pick. Plans of the policy, with their expected
# loss per pick and their time, on Mixtral's shape:

# %%
options = [
    "selector=uniform",
    "selector=prefix",
    "objective=use",
    "scope=model",
    "scope=model,objective=use",
]
paid = {}
for option in options:
    one = perfmodel.evaluate(
        "mixtral-8x7b", "h100-cxl2-ndp", trace, f"context-aware:mean_bits=2,{option}", prompt=128, output=512
    )
    paid[option] = one.quant_loss_vs_uniform
    print(f"{option:40s} loss over uniform {one.quant_loss_vs_uniform:.2f}, {1e3 * one.tpot_mean_s:.2f} ms a token")

# %%
assert abs(ratios[2, "plain"][0] - ratios[2, "plain"][1]) < 0.02
assert ratios[2, "importance"][0] < 1.03 < 1.3 < ratios[2, "importance"][1]
assert at_two[0] / at_two[1] > 2
assert paid["scope=model"] < paid["objective=use"] < paid["selector=prefix"] < 1

# %% [markdown]
# **Finding.** To the plain sum of losses the order of importance is worth no more than a random one, in decode it
# still pays because important experts are picked more, and one budget for the whole model lowers the summed loss at 2
# bits more than 2 times; but a smaller sum is no promise of a better model, since it is bought with experts at 1 bit.
