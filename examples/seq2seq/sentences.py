"""Pairs of sentences as arrays of word numbers, for both programs of this folder."""

import collections
import pathlib

import chainer
import numpy as np

EOS = 0  # ends each sentence, and begins it where a word is expected before the first
UNKNOWN = 1

_ENGLISH = "zero one two three four five six seven eight nine"
_SPANISH = "cero uno dos tres cuatro cinco seis siete ocho nueve"


def generate(n_pairs, seed):
    """Return English numbers and the Spanish ones in the opposite order, as text."""
    draw = np.random.RandomState(seed)
    numbers = [draw.randint(0, 10, draw.randint(2, 6)) for _ in range(n_pairs)]
    english, spanish = _ENGLISH.split(), _SPANISH.split()
    source = [" ".join(english[n] for n in line) for line in numbers]
    target = [" ".join(spanish[n] for n in line[::-1]) for line in numbers]
    return source, target


def read(path):
    """Return the lines of a text file: one sentence each, words between spaces."""
    return pathlib.Path(path).read_text(encoding="utf-8").splitlines()


def vocabulary(sentences, n_words):
    """Return word -> number for the most frequent words of some sentences."""
    counts = collections.Counter(word for line in sentences for word in line.split())
    # Equally frequent words in the order of the alphabet: the same on every run.
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate(ranked[: n_words - 2], start=2)}


def pairs(source, target, words, max_length):
    """Return a data set of pairs of int32 arrays, without empty or long sentences.

    Args:
        source, target: sentences as text, line by line.
        words: the two vocabularies.
        max_length: of either sentence, in words.
    """
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source lines, but {len(target)} target lines")
    result = []
    for lines in zip(source, target, strict=True):
        x, y = (
            np.array([known.get(word, UNKNOWN) for word in line.split()], np.int32)
            for line, known in zip(lines, words, strict=True)
        )
        if 0 < len(x) <= max_length and 0 < len(y) <= max_length:
            result.append((x, y))
    return result


def load(args):
    """Return training pairs, validation pairs, and the two vocabularies.

    The last tenth of the lines is kept for validation.
    """
    if args.smoke:
        source, target = generate(480, seed=0)
    elif args.source and args.target:
        source, target = read(args.source), read(args.target)
    else:
        raise SystemExit("give --source and --target, or --smoke")
    words = [vocabulary(text, args.vocabulary) for text in (source, target)]
    samples = pairs(source, target, words, args.max_length)
    n_train = len(samples) * 9 // 10
    return samples[:n_train], samples[n_train:], words


@chainer.dataset.converter()
def convert(batch, device):
    """Return two lists of arrays on the device: the sentences are unequally long."""
    sources, targets = zip(*batch, strict=True)
    return [device.send(x) for x in sources], [device.send(y) for y in targets]
