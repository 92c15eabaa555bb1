"""The attention of other libraries, each behind the same few methods: what bench.py compares with.

    available()                None, or why it cannot be used here
    refuses(cell)              None, or why it cannot do this problem (a records.Cell)
    forward(q, k, v, causal)   run: a function without arguments, the call that is timed
    to_cupy(result)            what run returned, as CuPy's (batch, seqlen, heads, head_dim)

q, k and v are CuPy arrays (batch, seqlen, heads, head_dim). Each library gets them in the layout
and dtype that it wants, converted before the clock starts. A pass that a class has no method for is
skipped. Nothing is imported before it is asked for.

FlashAttention-3 comes as flash_attn3_jax: its wheel on PyPI is built for head_dim 128 only, and
runs others, where it does, in that kernel. PyTorch's memory-efficient attention is the peer of
float32: on tensor cores, from Ampere on, each product of two float32 as three of TF32.
"""

import importlib
import importlib.util
import os

import numpy as np
import records
from dense import dense_backward, dense_forward

HALF = ("float16", "bfloat16")
DENSE_LIMIT = 16 << 30  # bytes of scores above which dense attention is skipped


def why(error):
    """An exception in a line: the first of its message, after its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def cannot_import(*modules):
    """None when every module imports, else why the first does not."""
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return f"{name} is not installed"
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken installation is one reason more to skip
            return f"{name} does not import: {why(error)}"
    return None


class Peer:
    """An implementation: `packages` are those whose versions its rows record."""

    name = ""
    packages = ()
    variant = ""
    dtypes = HALF
    count = None  # FLOPs of a call, when they are not attention's
    implementation = property(lambda self: self.name)
    by_default = True

    def available(self):
        return None

    def refuses(self, cell):
        if cell.dtype not in self.dtypes:
            return f"{cell.dtype}: only {', '.join(self.dtypes)}"
        return None

    def to_cupy(self, result):
        return result


class Dense(Peer):
    """All scores at once, through cuBLAS (scripts/dense.py); halves in float32."""

    name, by_default = "cupy-dense", False
    dtypes = ("float16", "bfloat16", "float32", "float64")

    def refuses(self, cell):
        if cell.batch * cell.heads * cell.seqlen**2 * 8 > DENSE_LIMIT:
            return f"its scores take more than {DENSE_LIMIT >> 30} GiB"
        return None

    def forward(self, q, k, v, causal):
        return lambda: dense_forward(q, k, v, q.shape[-1] ** -0.5, causal)

    def backward(self, do, q, k, v, causal):
        scale = q.shape[-1] ** -0.5
        o = dense_forward(q, k, v, scale, causal)
        return lambda: dense_backward(do, q, k, v, o, scale, causal)


class Matmul(Peer):
    """A square product of normal random matrices in the cell's dtype: the ceiling, not a peer."""

    name, packages = records.CEILING, ("torch", "nvidia-cublas")

    def __init__(self, size=8192):
        self.size, self.variant, self.count = size, f"matmul {size}", 2 * size**3
        self.operands = {}

    def forward(self, q, k, v, causal):
        import cupy

        if q.dtype not in self.operands:
            random = cupy.random.default_rng(1).standard_normal
            pair = (random((self.size, self.size), np.float32).astype(q.dtype) for _ in range(2))
            self.operands[q.dtype] = [self.convert(x) for x in pair]
        a, b = self.operands[q.dtype]
        return lambda: a @ b

    def backward(self, do, q, k, v, causal):
        return self.forward(q, k, v, causal)

    training = backward

    def convert(self, x):
        """PyTorch's cuBLAS call where there is PyTorch, else CuPy's."""
        return to_torch(x) if cannot_import("torch") is None else x


# --- PyTorch -----------------------------------------------------------------------------


def to_torch(x):
    """A tensor in the same memory."""
    import torch

    return torch.from_dlpack(x)


class Torch(Peer):
    """(batch, heads, seqlen, head_dim), contiguous: what PyTorch's users have."""

    packages = ("torch", "nvidia-cudnn-cu13", "triton")

    def available(self):
        problem = cannot_import("torch")
        if problem is None:
            import torch

            problem = None if torch.cuda.is_available() else "torch sees no GPU"
        return problem

    def tensors(self, *arrays):
        return [to_torch(x).transpose(1, 2).contiguous() for x in arrays]

    def forward(self, q, k, v, causal):
        attention, inputs = self.attention(causal), self.tensors(q, k, v)
        return lambda: attention(*inputs)

    def backward(self, do, q, k, v, causal):
        """The gradients alone, of one forward that was run before."""
        import torch

        do, *inputs = self.tensors(do, q, k, v)
        inputs = [x.requires_grad_() for x in inputs]
        o = self.attention(causal)(*inputs)
        return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)

    def training(self, do, q, k, v, causal):
        """The forward and then the gradients."""
        import torch

        do, *inputs = self.tensors(do, q, k, v)
        inputs = [x.requires_grad_() for x in inputs]
        attention = self.attention(causal)
        return lambda: torch.autograd.grad(attention(*inputs), inputs, do)

    def to_cupy(self, result):
        import cupy

        return cupy.from_dlpack(result.transpose(1, 2))


class TorchSDPA(Torch):
    """scaled_dot_product_attention, held to one of its backends."""

    def __init__(self, name, backend, dtypes=HALF, by_default=True):
        self.name, self.backend = name, backend
        self.dtypes, self.by_default = dtypes, by_default

    def attention(self, causal):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, self.backend)

        def run(q, k, v):
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class FlexAttention(Torch):
    """FlexAttention through torch.compile, with a block mask when causal."""

    name = "torch-flex"
    dtypes = (*HALF, "float32")

    def attention(self, causal):
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()  # else the ninth shape would run uncompiled
        compiled, masks = torch.compile(flex_attention, dynamic=False), {}

        def run(q, k, v):
            if causal and not masks:
                sizes = q.shape[2], k.shape[2]
                masks["block_mask"] = create_block_mask(causal_mask, None, None, *sizes, q.device)
            return compiled(q, k, v, **masks)

        return run


# --- JAX ---------------------------------------------------------------------------------


def to_jax(x):
    """A JAX array of the same numbers, in the same memory where DLPack manages that."""
    import jax

    try:
        return jax.dlpack.from_dlpack(x)
    except Exception:  # a dtype that one of the two does not export: a copy serves as well
        return jax.device_put(x.get())


class Jax(Peer):
    """(batch, seqlen, heads, head_dim), jitted."""

    modules = ()
    packages = ("jax", "jax-cuda13-plugin")

    def available(self):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        problem = cannot_import("jax", *self.modules)
        if problem is None:
            import jax

            backend = jax.default_backend()
            problem = None if backend == "gpu" else f"jax sees no GPU, its backend is {backend!r}"
        return problem

    def jitted(self, function, *arrays):
        import jax

        function, arrays = jax.jit(function), [to_jax(x) for x in arrays]
        return lambda: function(*arrays)

    def to_cupy(self, result):
        import cupy

        try:
            return cupy.from_dlpack(result)
        except Exception:  # as in to_jax
            return cupy.asarray(np.asarray(result))


class FlashAttention3(Jax):
    """FlashAttention-3's CUDA kernels, bound by flash_attn3_jax."""

    name, modules, packages = "fa3-jax", ("flash_attn3_jax",), (*Jax.packages, "flash-attn3-jax")

    def refuses(self, cell):
        if cell.head_dim != 128:
            return "its wheel has kernels for head_dim 128 only"
        return super().refuses(cell)

    def forward(self, q, k, v, causal):
        return self.jitted(self.attention(causal), q, k, v)

    def backward(self, do, q, k, v, causal):
        """The gradients alone, of one forward that was run before."""
        do, q, k, v = (to_jax(x) for x in (do, q, k, v))
        return self.jitted(self.gradients(causal), do, q, k, v, *self.with_lse(causal)(q, k, v))

    def training(self, do, q, k, v, causal):
        """The forward and then the gradients."""
        forward, gradients = self.with_lse(causal), self.gradients(causal)
        step = lambda do, q, k, v: gradients(do, q, k, v, *forward(q, k, v))
        return self.jitted(step, do, q, k, v)

    def with_lse(self, causal):
        from flash_attn3_jax.flash import _flash_mha_fwd

        options = {"is_causal": causal, "window_size": (-1, -1)}
        return lambda q, k, v: _flash_mha_fwd(q, k, v, softmax_scale=q.shape[3] ** -0.5, **options)

    def gradients(self, causal):
        """A function of do, q, k, v, o, lse.

        The wheel's own gradient allocates room for rows in multiples of 128, but its kernel uses
        tiles of 80 rows where it is not causal, and writes past the end. So it is called here with
        room enough for both.
        """
        import jax
        import jax.numpy as jnp

        def gradients(do, q, k, v, o, lse):
            batch, seqlen_q, heads, head_dim = q.shape
            rows = jax.ShapeDtypeStruct((batch, heads, -(-seqlen_q // 640) * 640), jnp.float32)
            new = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
            absent = [jnp.array([], jnp.int32)] * 4  # lengths of a ragged batch
            results = jax.ffi.ffi_call("flash_mha_bwd", [*new, rows, rows])(
                do, q, k, v, o, lse, *absent,
                max_seqlen_q_val=seqlen_q, max_seqlen_q_has_value=True,
                max_seqlen_k_val=k.shape[1], max_seqlen_k_has_value=True,
                softmax_scale_val=head_dim**-0.5, softmax_scale_has_value=True,
                is_causal=causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                deterministic=False, sm_margin=0,
            )  # fmt: skip
            return tuple(results[:3])

        return gradients

    def attention(self, causal):
        from flash_attn3_jax import flash_mha

        return lambda q, k, v: flash_mha(q, k, v, is_causal=causal)


class Pallas(Jax):
    """The Mosaic GPU attention that comes with JAX, in float16 whatever the inputs.

    Its kernel has float16 buffers and refuses bfloat16, as of JAX 0.11. It does not scale the
    scores: q comes scaled. BLOCK_KV is the widest tile that JAX's own benchmark tries which fits
    shared memory, but at 64 not 256 wide, of which half would be masked on a causal diagonal.
    """

    name = "pallas-float16"
    modules = ("jax.experimental.pallas.ops.gpu.attention_mgpu",)
    BLOCK_Q, BLOCK_KV = 64, {64: 128, 128: 128, 256: 64}

    def refuses(self, cell):
        if cell.head_dim not in self.BLOCK_KV:
            return f"no tile chosen for head_dim {cell.head_dim}"
        if cell.seqlen % max(2 * self.BLOCK_Q, self.BLOCK_KV[cell.head_dim]):
            return "seqlen is no multiple of its tiles"
        return super().refuses(cell)

    def forward(self, q, k, v, causal):
        from jax.experimental.pallas.ops.gpu.attention_mgpu import TuningConfig, attention

        head_dim = q.shape[-1]
        config = TuningConfig(
            block_q=self.BLOCK_Q,
            block_kv=self.BLOCK_KV[head_dim],
            max_concurrent_steps=2,
            causal=causal,
        )
        q = q.astype(np.float32) * head_dim**-0.5
        q, k, v = (x.astype(np.float16) for x in (q, k, v))
        return self.jitted(lambda q, k, v: attention(q, k, v, config), q, k, v)


# --- choosing ----------------------------------------------------------------------------

ALL = (
    TorchSDPA("torch-cudnn", "CUDNN_ATTENTION"),
    TorchSDPA("torch-flash", "FLASH_ATTENTION"),
    TorchSDPA("torch-efficient", "EFFICIENT_ATTENTION", (*HALF, "float32"), by_default=False),
    FlexAttention(),
    FlashAttention3(),
    Pallas(),
    Dense(),
    Matmul(),
)
NAMES = [peer.name for peer in ALL]


def choose(dtype, only=None, skip=()):
    """The peers to run, and {name: why not} of the others.

    Without `only`, dense and memory-efficient attention run where the inputs are no halves: in
    halves others are far ahead of them.
    """
    chosen, reasons = [], {}
    for peer in ALL:
        if peer.name in skip or (only is not None and peer.name not in only):
            reasons[peer.name] = "not asked for"
        elif only is None and not peer.by_default and dtype in HALF:
            reasons[peer.name] = "not asked for by name (--only)"
        else:
            try:
                problem = peer.available()
            except Exception as error:
                problem = why(error)
            if problem is None:
                chosen.append(peer)
            else:
                reasons[peer.name] = problem
    return chosen, reasons
