"""Bugs planted in the Hopper forward are found without a GPU.

Each replaces one line of kernels/forward_wgmma.py, or of what it calls, and runs the kernel in the
simulator: it reads what has not arrived, waits for ever, or is wrong.
"""

from types import ModuleType

import numpy as np
import pytest
from rule import assert_within_rule

import flashnumba as fn
from flashnumba import reference, simulate
from flashnumba.device import fragment
from flashnumba.kernels import forward_wgmma

SOURCE = fn.__path__[0] + "/kernels/forward_wgmma.py"
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
    "a work not given back": ("arrive_work(smem, WORK_EMPTY, turn)\n", NOTHING),
    "acc not rescaled": ("rescale(acc, a)\n", NOTHING),
    "acc not cleared": ("zero_acc(acc)\n\n", "pass\n\n"),
    "m kept for the next rows": ("m[r], l[r], shift[r] = MINUS_INF, ZERO, ZERO\n", "l[r] = ZERO\n"),
    "one tile too few masked": (SEEN, SEEN.replace("< full_end", "<= full_end")),
    "last tile forgotten": (LOOP, LOOP.replace("begin", "begin + 1")),
}


def check():
    """Two heads of more rows than a block has, keys in more tiles than shared memory has room for.

    The scores of the last tile are far above those before. Threads run in their usual order, and in
    another, in which TMA keeps no order either.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 300, 2, 128)).astype(np.float16) for _ in range(3))
    k[:, :100] *= 8
    exact, exact_lse = reference.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    low, _ = reference.low_precision(q, k, v, causal=True)
    for seed in (None, 1):
        with simulate.shuffled(seed):
            o, lse = fn.attention(q, k, v, causal=True, return_lse=True, backend="simulator-wgmma")
        assert_within_rule(o, exact, low, np.float16)
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=1e-5)


def broken(old, new):
    """The module's `make_forward`, with one line replaced wherever it stands."""
    with open(SOURCE) as file:
        source = file.read()
    assert old in source
    module = ModuleType("broken")
    exec(compile(source.replace(old, new), SOURCE, "exec"), module.__dict__)
    return module.make_forward


FOUND = (simulate.SimulatorError, simulate.Deadlock, AssertionError)


def test_the_kernel_without_a_bug():
    check()


@pytest.mark.parametrize("bug", LINES)
def test_a_planted_bug_is_found(bug, monkeypatch):
    monkeypatch.setattr(forward_wgmma, "make_forward", broken(*LINES[bug]))
    with pytest.raises(FOUND):
        check()


def test_a_wrong_swizzle_is_found(monkeypatch):
    """O is written 16 bytes beside its place."""
    right = fragment.swizzle128
    monkeypatch.setattr(fragment, "swizzle128", lambda at: right(at) ^ 16)
    fragment.output.cache_clear()
    as_it_is = broken("o and lse.", "o and lse.")  # but made anew, with the wrong swizzle
    monkeypatch.setattr(forward_wgmma, "make_forward", as_it_is)
    try:
        with pytest.raises(FOUND):
            check()
    finally:
        fragment.output.cache_clear()
