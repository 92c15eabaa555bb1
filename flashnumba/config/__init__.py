"""Frozen tile configurations, and how one is chosen. Each number has its measurement beside it."""

from flashnumba.config.families import (
    FAMILIES,
    HALVES,
    Family,
    families,
    names_of_families,
    version,
)
from flashnumba.config.machine import SIMULATED, Kernel, Machine
from flashnumba.config.mma import MmaBackwardConfig, MmaConfig, choose_mma, choose_mma_backward
from flashnumba.config.order import heads_together, kv_heads_in_turn, kv_heads_together
from flashnumba.config.simt import SimtConfig, choose_simt
from flashnumba.config.wgmma import (
    BackwardConfig,
    SplitBackwardConfig,
    WgmmaConfig,
    choose_split,
    choose_split_backward,
    choose_wgmma,
    choose_wgmma_backward,
)

__all__ = [
    "BackwardConfig",
    "FAMILIES",
    "Family",
    "HALVES",
    "Kernel",
    "Machine",
    "MmaBackwardConfig",
    "MmaConfig",
    "SIMULATED",
    "SimtConfig",
    "SplitBackwardConfig",
    "WgmmaConfig",
    "choose_mma",
    "choose_mma_backward",
    "choose_simt",
    "choose_split",
    "choose_split_backward",
    "choose_wgmma",
    "choose_wgmma_backward",
    "families",
    "heads_together",
    "kv_heads_in_turn",
    "kv_heads_together",
    "names_of_families",
    "version",
]
