"""When tasks on several resources run, and who runs which expert of a layer when several sides share the work.

The three splits take many layers at once: ``tokens`` int32 [N, E] says how many tokens picked each expert, and
``resident`` bool [N, E] which experts the GPU holds. The time of one expert [s] is looked up by its tokens in arrays
[M + 1], for 0 to M tokens: M is at least the largest entry of ``tokens``, and entry 0 is never read. They return
``executor`` uint8 [N, E], one of GPU, FETCH, NDP, SKIP and CPU below, SKIP for experts without tokens, and a time of
every layer [N] [s].
"""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls

import numpy as np
from numba import types

from perfmodel.kernels._jit import loop, read_only, scalar

# Where an expert runs, numbered as the executors of plans.
GPU, FETCH, NDP, SKIP, CPU = range(5)

_INTS, _FLOATS = read_only(types.int64[::1]), read_only(types.float64[::1])
_TOKENS, _RESIDENT = read_only(types.int32[:, ::1]), read_only(types.boolean[:, ::1])
_STARTS = types.UniTuple(types.float64[::1], 2)
_SPLIT = types.Tuple((types.uint8[:, ::1], types.float64[::1]))


@loop(_STARTS(_INTS, _FLOATS, _INTS, _INTS, types.int64))
def list_schedule(resource, duration, first, predecessors, num_resources):
    """Start and finish [s] of every task [n], each run as early as the ones listed before it allow.

    resource : int64 [n], what a task occupies alone while it runs, 0 to num_resources - 1.
    duration : float64 [n], >= 0.
    first : int64 [n + 1], where the predecessors of each task start, as in a compressed sparse row.
    predecessors : int64, tasks that must have finished; all are listed before the task itself.

    start = max(finish of the previous task on the resource, finish of all predecessors), at least 0. A resource keeps
    the order of the list, also when a later task could fill a gap.
    """
    tasks = resource.shape[0]
    start, finish = np.empty(tasks), np.empty(tasks)
    free = np.zeros(num_resources)
    for task in range(tasks):
        begin = free[resource[task]]
        for i in range(first[task], first[task + 1]):
            begin = max(begin, finish[predecessors[i]])
        start[task], finish[task] = begin, begin + duration[task]
        free[resource[task]] = finish[task]
    return start, finish


@scalar
def _by_tokens(tokens, resident, order):
    """Fill ``order`` with the experts to place, fewest tokens first, lower id first where equal; how many there are."""
    count = 0
    for expert in range(tokens.shape[0]):
        if tokens[expert] == 0 or resident[expert]:
            continue
        i = count
        while i > 0 and tokens[order[i - 1]] > tokens[expert]:
            order[i] = order[i - 1]
            i -= 1
        order[i] = expert
        count += 1
    return count


@scalar
def _start_with_residents(tokens, resident, gpu_s, executor):
    """Give the GPU its residents, skip experts without tokens, and say how long the GPU then is busy [s]."""
    busy = 0.0
    for expert in range(tokens.shape[0]):
        if tokens[expert] == 0:
            executor[expert] = SKIP
        elif resident[expert]:
            executor[expert] = GPU
            busy += gpu_s[tokens[expert]]
    return busy


@loop(_SPLIT(_TOKENS, _RESIDENT, _FLOATS, _FLOATS, types.float64))
def hybrid_split(tokens, resident, gpu_s, cpu_s, copy_s):
    """HybriMoE (arXiv 2504.05897): simulate GPU, CPU and link, and let who finishes first take the next expert.

    gpu_s, cpu_s : time of one expert on the GPU and on the CPU; copy_s : of its copy [s].

    Reading taken, since the published rule leaves the details open: the GPU first runs all residents. Of the missing
    experts the CPU would take the one with the fewest tokens; the link would copy the one with the most, which the GPU
    runs once it is there and the GPU is free. Whichever of the two would finish its expert earlier gets it (the CPU
    where equal, as it moves nothing), until none is left. The CPU never takes a resident. Equal tokens: the CPU takes
    the lower id first, the link the higher.

    The time of a layer is when the last side finishes. The greedy is not optimal. Its order suits a CPU that tokens
    slow down more than the GPU; where that is the other way round, it can take twice as long as the best split.
    """
    layers, experts = tokens.shape
    executor = np.empty((layers, experts), np.uint8)
    makespan = np.empty(layers)
    order = np.empty(experts, np.int64)
    for n in range(layers):
        gpu = _start_with_residents(tokens[n], resident[n], gpu_s, executor[n])
        cpu = link = 0.0
        low, high = 0, _by_tokens(tokens[n], resident[n], order) - 1
        while low <= high:
            on_cpu = cpu + cpu_s[tokens[n, order[low]]]
            on_gpu = max(gpu, link + copy_s) + gpu_s[tokens[n, order[high]]]
            if on_cpu <= on_gpu:
                executor[n, order[low]] = CPU
                cpu = on_cpu
                low += 1
            else:
                executor[n, order[high]] = FETCH
                gpu = on_gpu
                link += copy_s
                high -= 1
        makespan[n] = max(gpu, cpu)
    return executor, makespan


@loop(_SPLIT(_TOKENS, _RESIDENT, _FLOATS, _FLOATS, types.float64))
def fiddler_split(tokens, resident, gpu_s, cpu_s, copy_s):
    """Fiddler (arXiv 2402.07033): each missing expert runs where it costs less, whatever the other experts do.

    Parameters as in `hybrid_split`. An expert with s tokens runs on the CPU if cpu_s[s] <= copy_s + gpu_s[s], else it
    is copied to the GPU. This minimises the *sum* of the costs of missing experts, as the published code does (a
    remark there speaks of the largest); that sum is the time returned. Residents cost nothing in it.
    """
    layers, experts = tokens.shape
    executor = np.empty((layers, experts), np.uint8)
    total = np.zeros(layers)
    for n in range(layers):
        _start_with_residents(tokens[n], resident[n], gpu_s, executor[n])
        for expert in range(experts):
            if tokens[n, expert] == 0 or resident[n, expert]:
                continue
            here, there = cpu_s[tokens[n, expert]], copy_s + gpu_s[tokens[n, expert]]
            executor[n, expert] = CPU if here <= there else FETCH
            total[n] += min(here, there)
    return executor, total


@loop(_SPLIT(_TOKENS, _RESIDENT, _FLOATS, _FLOATS, types.float64, types.int64, types.boolean))
def pimoe_split(tokens, resident, gpu_s, ndp_s, copy_s, channels, guarded):
    """PIMoE: start with the hot experts on the GPU and the cold ones near the memory, then move work to the GPU.

    resident : bool [N, E], the hot experts.
    ndp_s : time of one expert near the memory, on its own channel [s].
    channels : memory channels, >= 1. Expert e lives on channel e mod ``channels`` and only runs there.

    While the busiest channel (lowest number where equal) is busy for longer than the GPU, its expert with the most
    tokens (lower id where equal) is copied to the GPU, one after another over one link; the GPU runs it once it is
    there and the GPU is free. As published the loop looks at the state before a move, so that the last move may take
    longer than it saves where copies are slow. ``guarded`` stops before a move after which the GPU would be busy for
    longer than the channel was: then the layer never takes longer than without any move.

    The time of a layer is when GPU and all channels are done.
    """
    layers, experts = tokens.shape
    executor = np.empty((layers, experts), np.uint8)
    makespan = np.empty(layers)
    busy = np.empty(channels)
    for n in range(layers):
        gpu = _start_with_residents(tokens[n], resident[n], gpu_s, executor[n])
        link = 0.0
        busy[:] = 0.0
        for expert in range(experts):
            if tokens[n, expert] > 0 and not resident[n, expert]:
                executor[n, expert] = NDP
                busy[expert % channels] += ndp_s[tokens[n, expert]]
        while True:
            channel = np.argmax(busy)
            if busy[channel] <= gpu:
                break
            chosen = -1
            left = 0.0
            for expert in range(channel, experts, channels):
                if executor[n, expert] != NDP:
                    continue
                if chosen < 0 or tokens[n, expert] > tokens[n, chosen]:
                    if chosen >= 0:
                        left += ndp_s[tokens[n, chosen]]
                    chosen = expert
                else:
                    left += ndp_s[tokens[n, expert]]
            after = max(gpu, link + copy_s) + gpu_s[tokens[n, chosen]]
            if guarded and after > busy[channel]:
                break
            executor[n, chosen] = FETCH
            gpu = after
            link += copy_s
            # Summed anew: what differences leave behind could keep an empty channel busy.
            busy[channel] = left
        makespan[n] = max(gpu, busy.max())
    return executor, makespan
