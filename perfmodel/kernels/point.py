"""Places of the numbers of one hardware point, in SI units and after derating."""

(
    GPU_FLOPS,  # effective rate [flop/s]
    GPU_BANDWIDTH,  # effective memory rate [byte/s]
    GPU_N_HALF,  # bytes at which a kernel reaches half of it [byte]
    LAUNCH_OVERHEAD,  # per kernel launch [s]
    LAYER_OVERHEAD,  # per layer, instead of the launches [s]
    LINK_BANDWIDTH,  # effective, one way [byte/s]
    LINK_LATENCY,  # [s]
    LINK_N_HALF,  # [byte]
    NDP_BANDWIDTH,  # effective DRAM rate [byte/s]; 0 without a device
    NDP_ARRAYS,
    NDP_ROWS,
    NDP_COLS,
    NDP_CLOCK,  # [Hz]
    NDP_DATAFLOW,
    NDP_SCALE_BITS,  # group scales read with each quantised weight [bit]
    NDP_SCALING,
    CPU_FLOPS,  # effective rate of its matrix units [flop/s]; 0 without a CPU
    CPU_VECTOR_FLOPS,  # effective rate of its vector units [flop/s]
    CPU_TILE,  # rows that its matrix units pad to [token]
    CPU_BANDWIDTH,  # effective DRAM rate [byte/s]
    CPU_OVERHEAD,  # per expert [s]
    ROUND_TRIP,  # the host reads what the GPU found and starts work anew [s]
    COPY_OVERHEAD,  # of the host, per copy of weights [s]
    EXPERT_BANDWIDTH,  # effective GPU memory rate of expert kernels [byte/s]
    EXPERT_N_HALF,  # per matrix of every expert on the GPU [byte]
    EXPERT_LAUNCH,  # per matrix of every expert on the GPU [s]
    EXPERT_TILE,  # tokens that matrix kernels pad those of an expert to [token]; 0 where they pad nothing
    BATCHED_FROM,  # tokens of a step from which BATCHED_FIXED is paid [token]; infinite for never
    BATCHED_FIXED,  # per layer with experts [s]
    PER_REDUCED_BYTE,  # reduced over several GPUs [s/byte]; 0 where one works on a layer
    ATTENTION_FIXED,  # fixed times, which no work changes: per layer with attention [s]
    RECURRENT_FIXED,  # per layer with a recurrent mixer [s]
    EXPERTS_FIXED,  # per layer with experts [s]
    MATRIX_FIXED,  # per matrix of one expert, for every layer with experts [s]
    DENSE_FIXED,  # per layer with a dense network [s]
    STEP_FIXED,  # per step [s]
    SEQUENCE_FIXED,  # per sequence of a step [s]
    CPU_PACK,  # rate at which its matrix kernels repack weights [byte/s]; 0 where they need not
    NDP_RATES,  # first of 33 places: native speed-up over FP16 at 0..32 bits
) = range(39)
MAX_RATE_BITS = 32
POINT_SIZE = NDP_RATES + MAX_RATE_BITS + 1

SCALING_NONE, SCALING_LINEAR, SCALING_NATIVE = 0, 1, 2
"""How arrays speed up at fewer bits: not at all, as 16 / bits, or by the table of native rates."""
