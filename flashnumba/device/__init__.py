"""Named arithmetic that kernels share; control flow and barriers between steps stay with them."""

from numba import cuda

# A function inside kernels. Numba compiles it once for each combination of argument types, and a
# Python integer is a type of its own; a closure it compiles wherever it is called.
inlined = cuda.jit(device=True, forceinline=True)
