"""Exact FlashAttention whose GPU kernels are ordinary Python."""

from flashnumba.attention import (
    Explanation,
    attention,
    attention_backward,
    attention_vjp,
    explain,
)

__all__ = ["Explanation", "attention", "attention_backward", "attention_vjp", "explain"]
__version__ = "0.1.0"
