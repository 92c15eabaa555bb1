"""Named arithmetic that kernels share; control flow and barriers between steps stay with them."""
