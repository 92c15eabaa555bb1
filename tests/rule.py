"""The pass rule: at most twice as far from exact as plain attention in the inputs' dtype."""

import ml_dtypes
import numpy as np


def eps(dtype):
    """Distance from 1 to the next larger number of `dtype`, as a Python float."""
    return float(ml_dtypes.finfo(dtype).eps)


def assert_within_rule(got, exact, low, dtype, what=""):
    """Assert max|got - exact| <= 2 max|low - exact| + floor, and equal infinities.

    Parameters
    ----------
    got : array
        The result under test.
    exact, low : arrays of the same shape
        The same quantity in float64, and in plain attention that rounds to the inputs' dtype.
    dtype : dtype
        What `got` is stored in; sets the floor.
    what : str, optional
        Named in the error message.
    """
    got, exact, low = (_numpy(x) for x in (got, exact, low))
    what = what or "result"
    assert got.shape == exact.shape == low.shape, (
        f"{what}: shapes differ, {got.shape=} {exact.shape=} {low.shape=}"
    )
    finite = np.isfinite(exact)
    assert not np.isnan(exact).any(), f"{what}: the exact result has NaN, so no rule applies"
    assert np.isfinite(low[finite]).all(), f"{what}: the baseline overflowed, so it allows nothing"

    # An infinity has to be the same infinity, and NaN is never right.
    wrong = np.where(finite, ~np.isfinite(got), got != exact)
    if wrong.any():
        index = _index(wrong.argmax(), wrong)
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} entries are not finite where they should be, "
            f"or not the right infinity; first at {index}: {got[index]}, exact {exact[index]}"
        )
    if not finite.any():
        return

    # The baseline can be exact by luck (one key, equal values), which must not demand exactness of
    # an order of summation that is not its own. Half an eps is lost by storing the result, another
    # half by storing p as an operand of p v; twice that, as for the baseline itself.
    floor = 2 * eps(dtype) * np.abs(exact[finite]).max()
    exact = np.where(finite, exact, 0)
    error = np.abs(np.where(finite, got, 0) - exact)
    baseline = np.abs(np.where(finite, low, 0) - exact).max()
    allowed = 2 * baseline + floor
    index = _index(error.argmax(), error)
    assert error[index] <= allowed, (
        f"{what}: max error {error[index]:.3e} exceeds {allowed:.3e} "
        f"(= 2 * baseline {baseline:.3e} + floor {floor:.3e}) by a factor of "
        f"{error[index] / allowed if allowed else np.inf:.3g} "
        f"at {index}: {got[index]}, exact {exact[index]}"
    )


def _numpy(x):
    """A NumPy or CuPy array as NumPy longdouble, in which no difference is lost."""
    return np.asarray(x.get() if type(x).__module__.startswith("cupy") else x).astype(np.longdouble)


def _index(flat, x):
    return tuple(int(i) for i in np.unravel_index(flat, x.shape))
