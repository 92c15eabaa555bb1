"""One algorithm, several machines: each file is the same recurrence, closer to the metal.

    blas.py     NumPy. A tile product is one call of BLAS, over batch and heads at once. No GPU.
    simt.py     Numba CUDA without special instructions: any GPU, any dtype, every head dimension.
                The one to read first, beside `reference.attention_tiled`.
    forward_mma.py, backward_mma.py
                Turing and later: ldmatrix and mma.sync, a warp's tensor cores, fed by cp.async.
                float16, bfloat16, and float32 as the sum of two TF32 numbers.
    forward_wgmma.py, backward_wgmma.py
                Hopper. TMA brings tiles, wgmma multiplies them, warps have roles. Halves only.
    forward_split.py, backward_split.py
                The same for float32 as the sum of three bfloat16 numbers.

A kernel file holds control flow, barriers and memory layout, top to bottom. Kernels come from
factories that take a frozen configuration (config/) and return a `config.Kernel`; runtime.py
compiles and launches it, simulate.py runs the same function in Python.
"""
