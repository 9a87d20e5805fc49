"""What experts cost on a system, for the policies whose decisions depend on it; by the formulas that price plans."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perfmodel.errors import PolicyError
from perfmodel.hardware import System
from perfmodel.kernels import point as place
from perfmodel.kernels import price, roofline
from perfmodel.kernels import work as kinds
from perfmodel.model import MoEModel
from perfmodel.operators import operators
from perfmodel.point import Points, hardware_point
from perfmodel.policies.base import CAPACITY_KEYS, Policy

#: Hardware keys that such decisions can depend on; see `Policy.plan_keys`.
COST_KEYS = (*CAPACITY_KEYS, "gpu.", "link.", "cpu.", "host.", "ndp.", "engine.")


class ExpertCosts(NamedTuple):
    """Times of one expert with each of N token counts [s].

    gpu_s, cpu_s, ndp_s : float64 [N], computing on each device; the near-data one with its activations. Infinite on a
        system without the device. copy_s : one copy over the link.
    """

    gpu_s: NDArray[np.float64]
    cpu_s: NDArray[np.float64]
    ndp_s: NDArray[np.float64]
    copy_s: float


def expert_matrices(model: MoEModel) -> NDArray[np.float64]:
    """Input size, output size and number of the distinct matrices of one expert [M, 3]."""
    shapes, count = np.unique(np.array(model.expert_matrices, np.float64), axis=0, return_counts=True)
    return np.column_stack([shapes, count.astype(np.float64)])


def expert_costs(model: MoEModel, system: System, tokens: ArrayLike, bits: float) -> ExpertCosts:
    """Times of one expert of ``bits`` stored bits with each of the token counts [N]."""
    counts = np.atleast_1d(np.asarray(tokens, np.float64))
    devices = (kinds.ON_GPU_AFTER_FETCH, kinds.ON_CPU, kinds.ON_NDP)
    work = np.zeros((len(devices), len(counts) + 1, kinds.WORK_SIZE))
    work[..., kinds.EXECUTOR] = np.array(devices, np.float64)[:, None]
    work[..., kinds.TOKENS] = np.append(counts, 1.0)
    work[..., kinds.BITS] = bits
    times = price.work_times(
        *Points.one(hardware_point(system)),
        work.reshape(-1, kinds.WORK_SIZE),
        float(model.expert_params),
        float(model.hidden_size),
        expert_matrices(model),
    ).reshape(*work.shape[:2], kinds.EVERY)
    copied, host, near = times
    none = np.full(len(counts), np.inf)
    return ExpertCosts(
        copied[:-1, kinds.GPU].copy(),
        none if system.cpu is None else host[:-1, kinds.CPU].copy(),
        none if system.ndp is None else near[:-1, kinds.NDP_SIDE].copy(),
        float(copied[-1, kinds.LINK]),
    )


def shared_experts_s(model: MoEModel, system: System) -> float:
    """Time of the shared experts of one MoE layer with one token on the GPU [s]; 0 without such experts."""
    _, flops, moved, launches = operators(model)[-1].row(model, 1.0)
    point = hardware_point(system)
    if moved == 0.0:
        return 0.0
    return float(
        roofline.roofline_time(
            flops,
            moved,
            point[place.GPU_FLOPS],
            point[place.GPU_BANDWIDTH],
            point[place.GPU_N_HALF],
            launches * point[place.LAUNCH_OVERHEAD],
        )
    )


def need_cpu(policy: Policy, system: System) -> None:
    """Refuse a system without a CPU."""
    if system.cpu is None:
        raise PolicyError(
            f"policy {policy.name} runs experts on the CPU, and system {system.name} has none; "
            "choose a system with a cpu part (perfmodel specs list)"
        )
