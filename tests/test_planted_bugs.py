"""Bugs planted in the kernels on tensor cores are found without a GPU.

Each replaces one line of a kernel, or of what it calls, and runs it in the simulator: it reads what
has not arrived, waits for ever, or is wrong.
"""

import sys
from types import ModuleType

import numpy as np
import pytest
from rule import assert_within_rule

import flashnumba as fn
from flashnumba import reference, simulate
from flashnumba.device import fragment, product, softmax
from flashnumba.kernels import (
    backward_block,
    backward_mma,
    backward_split,
    backward_wgmma,
    forward_block,
    forward_mma,
    forward_split,
    forward_wgmma,
)

WAITS = "wait_kv(smem, K_FULL, n_next)\n        wait_kv(smem, V_READY, n)\n"
ISSUE = "issue_pv(smem, n, acc, p)\n\n"
LOOP = "while n_block > begin:\n                n_block, next_n"
SEEN = "full_begin <= n_block < full_end"
NOTHING = "pass\n"
LINES = {
    "no wait for K": (WAITS, "wait_kv(smem, V_READY, n)\n"),
    "no wait for V": (WAITS, "wait_kv(smem, K_FULL, n_next)\n"),
    "no wait for Q": ("wait_q(smem, Q_FULL, turn)\n", NOTHING),
    "no wait for acc": ("wait_acc(acc)\n", NOTHING),
    "no wait for the store before": ("wait_stores()\n", NOTHING),
    "no fence before the store": ("fence_proxy_async()\n", NOTHING),
    "V given back too early": (ISSUE, ISSUE + "        give_back(smem, V_EMPTY, n)\n\n"),
    "K not given back": ("give_back(smem, K_EMPTY, n)\n        if n_block", "if n_block"),
    "Q not given back": ("arrive_q(smem, Q_EMPTY, turn)\n", NOTHING),
    "a work not given back": ("arrive_work(smem, WORK_EMPTY, turn)  # by", "pass  #"),
    "acc not rescaled": ("rescale(acc, a)\n", NOTHING),
    "acc not cleared": ("zero_acc(acc)\n\n", "pass\n\n"),
    "m kept for the next rows": ("m[r], l[r], shift[r] = MINUS_INF, ZERO, ZERO\n", "l[r] = ZERO\n"),
    "one tile too few masked": (SEEN, SEEN.replace("< full_end", "<= full_end")),
    "last tile forgotten": (LOOP, LOOP.replace("begin", "begin + 1")),
}


S_MASK = "hide(s, smem, warp, m_block, window)"
DS_THERE = "arrive_ds(smem, DS_FULL, n)"
TURN = "st_release_u32(turns[b, head], u32(m_block), u32(n_block + 1))\n"
DQ = "gemm_dq(dq, descriptor(DS_MN, ds_tile), descriptor(KV_MN, k_columns))"
OF_BACKWARD = {
    "no wait for Q": ("wait_q(smem, Q_READY, n)\n", NOTHING),
    "no wait for dO": ("wait_q(smem, DO_READY, n)\n", NOTHING),
    "no wait for s": ("wait_s(s)\n", NOTHING),
    "no wait for dq": ("wait_dq(dq)\n", NOTHING),
    "no fence before ds is read": ("fence_proxy_async()\n        " + DS_THERE, DS_THERE),
    "ds read before all of it is there": ("wait_ds(smem, DS_FULL, n)\n", NOTHING),
    "one buffer for ds": ("n % DS_SLOTS * DS_BYTES", "u32(0)"),
    "dq of the same tile": ("before if LAGGING else n", "n"),
    "turn not passed on": (TURN, NOTHING),
    "dO given back too early": ("wait_s(dp)\n", "arrive_q(smem, DO_EMPTY, n)\n"),
    "Q not given back": ("arrive_q(smem, Q_EMPTY, n)\n", NOTHING),
    "dk written before its last tile": ("wait_acc(dk_acc)\n", NOTHING),
    "p not masked": (S_MASK, "pass"),
    "dk not scaled": ("dk_acc[i] *= scale\n", NOTHING),
    "dv not cleared": ("zero_acc(dv_acc)\n", NOTHING),
    "K replaced too early": (
        "wait_one_before(smem, KV_EMPTY, turn)\n            describe",
        "describe",
    ),
    "dv where ds is still read": ("wait_one(smem, KV_EMPTY, turn)\n", NOTHING),
    "ds where dv still leaves from": ("wait_stores()  # of the work before", "pass  # "),
    "the next work's tiles counted from 0": ("n = consume_tiles(", "consume_tiles("),
    "k of the other columns": (DQ, DQ.replace("k_columns", "smem")),
}

K_THERE = "wait_kv(smem, K_FULL, n)\n        wgmma_fence"
WAIT_PV, GIVE_V = "wait_tile(tile)\n        ", "give_back(smem, V_EMPTY, n)\n        "
O_LEFT = "bar_sync(together, u32(128))\n        if speaks"
OF_SPLIT_FORWARD = {
    "acc not rescaled": ("rescale(acc, a)\n", NOTHING),
    "wait for K by the number of the work": (K_THERE, K_THERE.replace(", n)", ", turn)")),
    "V given back too early": (WAIT_PV + GIVE_V, GIVE_V + WAIT_PV),
    "Q loaded where O still leaves from": (O_LEFT, NOTHING + "        if speaks"),
    "smallest products left out": ("= factors(PARTS),", "= factors(PARTS)[1:],"),
    "one tile too few masked": (SEEN, SEEN.replace("< full_end", "<= full_end")),
}

OWN = "bar_sync(OWN, u32(128))\n"
# What is of its own; of what both backwards share, the bugs above.
OF_SPLIT_BACKWARD = {
    "no wait for Q": ("wait_q(smem, Q_READY, n)\n", NOTHING),
    "no wait for dO": ("wait_q(smem, DO_READY, n)\n", NOTHING),
    "no wait for s": ("wait_wide(both)\n            wait_narrow(x)\n", NOTHING),
    "no wait for dv, dk": ("wait_acc(tile)\n", NOTHING),
    "no wait for dq": ("wait_acc(dq)\n", NOTHING),
    "no wait for p": ("wait_one(smem, P_FULL, n)\n", NOTHING),
    "p where ds is still read": ("wait_one_before(smem, P_EMPTY, n)\n", NOTHING),
    "ds where p is still read": (OWN + "        to_shared", NOTHING + "        to_shared"),
    "no fence before ds is read": ("fence_proxy_async()\n", NOTHING),
    "Q given back too early": ("share(smem, warp, ds)\n", "arrive_q(smem, Q_EMPTY, n)\n"),
    "second pieces not given back": ("empty_2 if PIECES > 1 else empty", "empty"),
    "second pieces of the first rows": ("i32(row0 + M_ROWS)", "row0"),
    "not added up": ("acc[i] += tile[i]", "acc[i] = tile[i]"),
    "parts of the other columns": ("4 * (k // 4 * PARTS + part)", "4 * (k // 4 + 2 * part)"),
    "lowest parts left out": ("f32(x[i] + both[SIZE + i])", "both[SIZE + i]"),
}


WAIT = "wait_tile()\n            "
BARRIER = "cuda.syncthreads()\n"
BAD = "st_shared_u32(u32(smem + BAD), ONE)\n        "
OF_WARPS = {
    "no wait for a tile": (WAIT, ""),
    "no barrier after the wait": (WAIT + BARRIER, WAIT + NOTHING),
    "a slot filled too early": (
        WAIT,
        WAIT + "load_kv(k_slot(smem, n + ONE), k_part, MINUS_FAR, MINUS_FAR)\n            ",
    ),
    "a slot filled in place of the next": ("u32(n + u32(STAGES - 1))", "u32(n + u32(STAGES))"),
    "V of the other slot": ("v_slot(smem, n) + of_v", "v_slot(smem, n + ONE) + of_v"),
    "a tile not committed": ("        commit()\n", "        pass\n"),
    "acc not rescaled": ("rescale(acc, a)\n", NOTHING),
    "l not rescaled": ("l[r] *= a[r]\n", NOTHING),
    "m kept": ("m[r], shift[r] = m_new", "m[r], shift[r] = m[r]"),
    "one tile too few masked": ("<= n_block < i32(four[2])", "<= n_block <= i32(four[2])"),
    "one tile too few masked on the left": ("full = i32(four[1])", "full = i32(four[1]) - 1"),
    "last tile forgotten": ("while n_block >= begin", "while n_block > begin"),
    "the tiles of the warp before": ("visits(own, n_block)", "visits(u32(own - 16), n_block)"),
    "V not cleaned": ("clean_v(smem, n, warp)\n", NOTHING),
    "no barrier after V is cleaned": (BAD + BARRIER, BAD + NOTHING),
    "O not restored": (BAD, "pass\n        "),
    "O restored a row too early": ("key - offset - row0", "key - offset - row0 - 1"),
    "rows without keys divided": ("rcp(total) if seen else ZERO", "rcp(total)"),
    "lse of rows past their sequence": (" and q_idx < q_length\n", "\n"),
    "the sum of one lane": ("row_sum(l[r])", "l[r]"),
}
OF_WARPS_IN_FLOAT32 = {
    "products of scores not made good": ("f32(product.ss_factor)", "ONE"),
    "products of p not made good": ("f32(product.rs_factor)", "ONE"),
    "plain TF32": ("config.products", "1"),
    "V read as halves are": ("b_mn_major=pairs,", "b_mn_major=first_rows,"),
}
CLEAR = "clear(slot(smem + {}, n, Q_BYTES), stats)\n"
DS_WRITTEN = "p_to_shared(dp, u32(smem + DS + p_own))\n            "
OF_WARPS_BACKWARD = {
    "no wait for a tile": (WAIT, ""),
    "no barrier after the wait": (WAIT + BARRIER, WAIT + NOTHING),
    "a slot filled too early": (
        WAIT,
        WAIT + "load_q(slot(smem + DO, n + ONE, Q_BYTES), q[b, :, h, column:], 0, 0)\n            ",
    ),
    "dO of the other slot": (
        "slot(smem + DO, n, Q_BYTES)\n",
        "slot(smem + DO, n + ONE, Q_BYTES)\n",
    ),
    "a tile not committed": ("        commit()\n", "        pass\n"),
    "lse of another tile": ("(smem, n, s_query, 0, lse)", "(smem, n + ONE, s_query, 0, lse)"),
    "p not masked": ("hide(s, smem, key0, query0, left, right)\n", NOTHING),
    "ds not masked": ("hide(dp, smem, key0, query0, left, right)\n", NOTHING),
    "one tile too few masked": (
        "m_block < field(smem, FULL_END)",
        "m_block <= field(smem, FULL_END)",
    ),
    "p and ds read before they are there": (DS_WRITTEN + BARRIER, DS_WRITTEN + NOTHING),
    "ds where p is": ("DS = u32(P + P_BYTES)", "DS = P"),
    "dq of the first columns": ("u32(column + u32(DQ_COLUMNS * i))", "u32(DQ_COLUMNS * i)"),
    "dq of the first queries": ("query = warp % u32(DQ_SPLIT)", "query = u32(0)"),
    "turn not passed on": ("st_release_u32(turns, u32(m_block), u32(n_block + 1))\n", NOTHING),
    "last tile forgotten": ("while n < count:", "while n + ONE < count:"),
    "the same head again": ("h, m_block = i32(h + 1)", "h, m_block = h"),
    "Q of rows without keys not cleared": (CLEAR.format("Q"), NOTHING),
    "dO of rows without keys not cleared": (CLEAR.format("DO"), NOTHING),
    "no barrier after K is cleaned": ("stats)\n        " + BARRIER, "stats)\n"),
    "dk where K is still read": ("wait_all()\n        " + BARRIER, "wait_all()\n"),
    "dk not scaled": ("dk_acc[i] *= f32(scale * FACTOR)\n", NOTHING),
}
OF_WARPS_BACKWARD_IN_FLOAT32 = {
    "dv not made good": ("dv_acc[i] *= FACTOR\n", NOTHING),
    "p in the usual order of columns": ("as_factor=True", "as_factor=False"),
    "ds^T read as p is": ("a_mn_major=pairs_in_order", "a_mn_major=pairs"),
}


def example():
    """Two heads of more rows than a block has, keys in more tiles than shared memory has room for.

    The scores of the last tile are far above those before.
    """
    rng = np.random.default_rng(0)
    do, q, k, v = (rng.standard_normal((1, 300, 2, 128)).astype(np.float16) for _ in range(4))
    k[:, :100] *= 8
    return (do, q, k, v), {"causal": True}


def example_of_warps(dtype):
    """Three sequences: tiles seen in full and in part, rows that see no key, and no key at all.

    The scores of a tile in the middle are far above those that are computed before. One value is
    infinite that some rows of its tile do not see.
    """
    do, q, k, v = random_numbers(dtype, (3, 64, 1), (3, 128, 1))
    k[0, 32:64] *= 8
    v[0, 110, 0, 3] = np.inf
    k[1, 40:] = v[1, 40:] = np.nan
    lengths = {"q_lengths": [60, 64, 64], "kv_lengths": [128, 40, 0]}
    return (do, q, k, v), {"causal": True, "window": (100, None), **lengths}


def example_of_warps_backward(dtype):
    """Two sequences, two heads: a key that no query sees is not finite, nor are queries that see
    no key.
    """
    do, q, k, v = random_numbers(dtype, (2, 32, 2), (2, 96, 1))
    k[0, 5] = v[0, 5] = k[1, 20:] = v[1, 20:] = np.nan
    q[0, 30:] = do[0, 30:] = q[1, :12] = do[1, :12] = np.nan
    lengths = {"q_lengths": [30, 32], "kv_lengths": [96, 20]}
    return (do, q, k, v), {"causal": True, "window": (30, None), **lengths}


def example_of_split_forward(works):
    """A work of two tiles, of which the second consumer alone sees the last; or two in a block.

    The scores of the tile that both see are far above those of the one before. Two works are two
    of three heads, with a tile each: of many tiles they would take long.
    """
    if works == 2:
        return random_numbers(np.float32, (1, 128, 3), (1, 20, 1)), {}
    do, q, k, v = random_numbers(np.float32, (1, 66, 1), (1, 130, 1))
    k[:, :128] *= 8
    return (do, q, k, v), {"causal": True}


def example_of_split_backward(dim):
    """Rows of more than one tile; a key that no query sees is not finite.

    With 128 columns there is one slot for tiles of queries, with 64 there are several.
    """
    rng = np.random.default_rng(0)
    do, q, k, v = (rng.standard_normal((1, 140, 1, dim)).astype(np.float32) for _ in range(4))
    k[0, 138:] = v[0, 138:] = np.nan
    return (do, q, k, v), {"causal": True, "kv_lengths": [138], "window": (100, None)}


def random_numbers(dtype, queries, keys):
    """do, q, k, v with 64 columns."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*x, 64)).astype(dtype) for x in (queries, queries, keys, keys)]


def check_forward(backend, given, options):
    """In the usual order of threads, and in two others, in which TMA keeps no order either."""
    _, q, k, v = given
    exact, exact_lse = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
    low, _ = reference.low_precision(q, k, v, **options)
    for seed in (None, 1, 2):
        with simulate.shuffled(seed):
            o, lse = fn.attention(q, k, v, return_lse=True, backend=backend, **options)
        assert_within_rule(o, exact, low, q.dtype)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


def check_backward(backend, given, options, always_deterministic=True):
    exact = reference.attention_backward(*(x.astype(np.float64) for x in given), **options)
    low = reference.low_precision_backward(*given, **options)
    o, lse = fn.attention(*given[1:], return_lse=True, backend="numpy", **options)
    for seed in (None, 1, 2):
        more = {"deterministic": always_deterministic or seed is None, "backend": backend}
        with simulate.shuffled(seed):
            got = fn.attention_backward(*given, o, lse, **more, **options)
        for name, *grads in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
            assert_within_rule(*grads, given[0].dtype, name)


def broken(monkeypatch, old, new, *modules):
    """Replace modules by what their sources are with a line replaced wherever it stands.

    Each imports from those before it, the last is what is run.
    """
    found = False
    for module in modules:
        with open(module.__file__) as file:
            source = file.read()
        found |= old in source
        other = ModuleType(module.__name__)
        exec(compile(source.replace(old, new), module.__file__, "exec"), other.__dict__)
        monkeypatch.setitem(sys.modules, module.__name__, other)
    assert found


FOUND = (simulate.SimulatorError, simulate.Deadlock, AssertionError)


def test_the_forward_without_a_bug():
    check_forward("simulator-wgmma", *example())


def test_the_backward_without_a_bug():
    check_backward("simulator-wgmma", *example())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_mma_forward_without_a_bug(dtype):
    check_forward("simulator-mma", *example_of_warps(dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_mma_backward_without_a_bug(dtype):
    check_backward("simulator-mma", *example_of_warps_backward(dtype), False)


@pytest.mark.parametrize("bug", LINES)
def test_a_bug_in_the_forward_is_found(bug, monkeypatch):
    broken(monkeypatch, *LINES[bug], forward_block, forward_wgmma)
    with pytest.raises(FOUND):
        check_forward("simulator-wgmma", *example())


@pytest.mark.parametrize("bug", OF_BACKWARD)
def test_a_bug_in_the_backward_is_found(bug, monkeypatch):
    broken(monkeypatch, *OF_BACKWARD[bug], backward_block, backward_wgmma)
    with pytest.raises(FOUND):
        check_backward("simulator-wgmma", *example())


@pytest.mark.parametrize("works", [1, 2])
def test_the_split_forward_without_a_bug(works):
    check_forward("simulator-wgmma", *example_of_split_forward(works))


@pytest.mark.parametrize("bug", OF_SPLIT_FORWARD)
def test_a_bug_in_the_split_forward_is_found(bug, monkeypatch):
    broken(monkeypatch, *OF_SPLIT_FORWARD[bug], forward_block, forward_split)
    works = 2 if bug == "Q loaded where O still leaves from" else 1
    with pytest.raises(FOUND):
        check_forward("simulator-wgmma", *example_of_split_forward(works))


@pytest.mark.parametrize("dim", [64, 128])
def test_the_split_backward_without_a_bug(dim):
    check_backward("simulator-wgmma", *example_of_split_backward(dim))


@pytest.mark.parametrize("bug", OF_SPLIT_BACKWARD)
def test_a_bug_in_the_split_backward_is_found(bug, monkeypatch):
    broken(monkeypatch, *OF_SPLIT_BACKWARD[bug], backward_block, backward_split)
    dim = 64 if bug == "p where ds is still read" else 128
    with pytest.raises(FOUND):
        check_backward("simulator-wgmma", *example_of_split_backward(dim))


@pytest.mark.parametrize("bug", [*OF_WARPS, *OF_WARPS_IN_FLOAT32])
def test_a_bug_in_the_mma_forward_is_found(bug, monkeypatch):
    lines = (OF_WARPS | OF_WARPS_IN_FLOAT32)[bug]
    dtype = "float32" if bug in OF_WARPS_IN_FLOAT32 else "float16"
    broken(monkeypatch, *lines, softmax, product, forward_mma)
    with pytest.raises(FOUND):
        check_forward("simulator-mma", *example_of_warps(dtype))


@pytest.mark.parametrize("bug", [*OF_WARPS_BACKWARD, *OF_WARPS_BACKWARD_IN_FLOAT32])
def test_a_bug_in_the_mma_backward_is_found(bug, monkeypatch):
    lines = (OF_WARPS_BACKWARD | OF_WARPS_BACKWARD_IN_FLOAT32)[bug]
    dtype = "float32" if bug in OF_WARPS_BACKWARD_IN_FLOAT32 else "float16"
    broken(monkeypatch, *lines, product, backward_mma)
    with pytest.raises(FOUND):
        check_backward("simulator-mma", *example_of_warps_backward(dtype), False)


def test_a_wrong_swizzle_is_found(monkeypatch):
    """O is written 16 bytes beside its place."""
    right = fragment.swizzle128
    monkeypatch.setattr(fragment, "swizzle128", lambda at: right(at) ^ 16)
    fragment.output.cache_clear()
    try:
        with pytest.raises(FOUND):
            broken(monkeypatch, "o and lse.", "o and lse.", forward_wgmma)
            check_forward("simulator-wgmma", *example())
    finally:
        fragment.output.cache_clear()
