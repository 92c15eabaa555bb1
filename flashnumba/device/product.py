"""How kernels on the tensor cores of a warp multiply, by dtype: one name for halves and float32."""

from functools import cache
from types import SimpleNamespace

from flashnumba.device.fragment import first_columns, first_rows, pairs, pairs_in_order
from flashnumba.ptx.mma import mma_rs, mma_ss
from flashnumba.ptx.mma_tf32 import tf32_rs, tf32_ss


@cache
def products(config):
    """Products of tiles, and where each lane reads the factors of one.

    `ss` multiplies two factors from shared memory, `rs` an accumulator by one; the results are too
    small by `ss_factor` and `rs_factor`. The factors' addresses are `a_k_major` and so on.
    """
    if config.dtype == "float32":
        return SimpleNamespace(
            ss=lambda tiles, n, k, *rows, **form: tf32_ss(
                tiles, n, k, config.products, *rows, **form
            ),
            rs=lambda tiles, n, k, rows: tf32_rs(tiles, n, k, config.products, rows),
            ss_factor=4,
            rs_factor=2,
            a_k_major=first_rows,
            a_mn_major=pairs_in_order,
            b_k_major=first_columns,
            b_mn_major=pairs,
        )
    dtype, turing = config.dtype, config.turing
    return SimpleNamespace(
        ss=lambda tiles, n, k, *rows, **form: mma_ss(
            tiles, n, k, dtype, *rows, **form, turing=turing
        ),
        rs=lambda tiles, n, k, rows: mma_rs(tiles, n, k, dtype, rows, turing=turing),
        ss_factor=1,
        rs_factor=1,
        a_k_major=first_rows,
        a_mn_major=first_columns,
        b_k_major=first_columns,
        b_mn_major=first_rows,
    )
