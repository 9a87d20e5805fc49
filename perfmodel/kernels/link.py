"""Time of one transfer over a link."""

# The compiler infers the types of kernels.
# mypy: allow-untyped-defs

from perfmodel.kernels._jit import scalar, ufunc


@scalar
def _transfer1(bytes_moved, s_per_byte, latency_s, n_half_bytes):
    """A transfer of something, from the time of a byte."""
    return latency_s + (bytes_moved + n_half_bytes) * s_per_byte


@scalar
def _transfer_time1(bytes_moved, bytes_per_s, latency_s, n_half_bytes):
    if bytes_moved == 0.0:
        return 0.0
    return _transfer1(bytes_moved, 1.0 / bytes_per_s, latency_s, n_half_bytes)


@ufunc(4)
def transfer_time(bytes_moved, bytes_per_s, latency_s, n_half_bytes):
    """Time of one transfer in one direction [s].

    Equation: ``latency_s + (bytes_moved + n_half_bytes) / bytes_per_s``, and 0 when there is nothing to move.

    Parameters (all broadcast)
    --------------------------
    bytes_moved : size, not negative [byte]
    bytes_per_s : rate that a very large transfer reaches, positive [byte/s]
    latency_s : one-way latency [s]
    n_half_bytes : size at which half of ``bytes_per_s`` is reached (latency apart) [byte]

    >>> float(transfer_time(32e9, 32e9, 0.5, 0.0))
    1.5
    """
    return _transfer_time1(bytes_moved, bytes_per_s, latency_s, n_half_bytes)
