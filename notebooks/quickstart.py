# %% [markdown]
# # How much link does MoNDE need to catch up?
#
# One plan, many machines: decode rate of MoNDE and of the context-aware system against the link's bandwidth.
# Open with jupytext, or run as a script.

# %%
import numpy as np

import perfmodel
from perfmodel.point import hardware_point

model = perfmodel.MoEModel.from_config("mixtral-8x7b")
system = perfmodel.load_system("h100-cxl2-ndp")
trace = perfmodel.RoutingTrace.load("tiny-mixtral-32l-mini")

# %% [markdown]
# Plans do not depend on the link here, so each policy is planned once and priced on every machine.

# %%
links_gb_per_s = np.array([16.0, 32.0, 64.0, 128.0, 256.0, 450.0])
points = np.stack(
    [hardware_point(system.with_values({"link.bandwidth_gb_per_s": float(link)})) for link in links_gb_per_s]
)
rates = {}
for policy in ("monde", "hobbit", "context-aware:mean_bits=3"):
    run = perfmodel.plan_run(model, system, trace, policy, prompt=128, output=512)
    rates[policy] = 1.0 / run.mean_token_s(points)

# %%
print("link [GB/s]".ljust(34), *(f"{link:8g}" for link in links_gb_per_s))
for policy, values in rates.items():
    print(f"{policy} [tok/s]".ljust(34), *(f"{value:8.2f}" for value in values))

# %% [markdown]
# The context-aware system barely notices the link, because only activations cross it while decoding.

# %%
spread = rates["context-aware:mean_bits=3"].max() / rates["context-aware:mean_bits=3"].min()
assert spread < 1.05
assert np.all(np.diff(rates["monde"]) > 0)
