"""Train a translator of sentences on several ranks, each with a part of the pairs.

    mpiexec -n 2 python examples/seq2seq/train_seq2seq.py --source en.txt \\
        --target fr.txt
    mpiexec -n 2 python examples/seq2seq/train_seq2seq.py --smoke

Sentences are unequally long, so the ranks' batches have different numbers of words.
The loss is a mean over words; with count_samples the ranks weigh by their words, and a
step is that of one process with the batch of all of them.

The lines of the two files correspond. --smoke learns to translate spoken digits and to
reverse their order. After Sutskever, Vinyals and Le (arXiv 1409.3215).
"""

import argparse
import hashlib
import itertools

import chainermn_ng

import chainer
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.backends import cuda
from chainer.training import extensions
from sentences import EOS, convert, load


class Seq2seq(chainer.Chain):
    """An encoder whose last state is where the decoder begins."""

    def __init__(self, n_layers, n_source, n_target, n_units):
        super().__init__()
        with self.init_scope():
            self.embed_x = L.EmbedID(n_source, n_units)
            self.embed_y = L.EmbedID(n_target, n_units)
            self.encoder = L.NStepLSTM(n_layers, n_units, n_units, 0.1)
            self.decoder = L.NStepLSTM(n_layers, n_units, n_units, 0.1)
            self.output = L.Linear(n_units, n_target)

    def encode(self, xs):
        hidden, cell, _ = self.encoder(None, None, [self.embed_x(x) for x in xs])
        return hidden, cell

    def forward(self, xs, ys):
        """Return the mean loss over all words, given the right words before each."""
        eos = self.xp.array([EOS], self.xp.int32)
        before = [self.embed_y(self.xp.concatenate((eos, y))) for y in ys]
        after = self.xp.concatenate([part for y in ys for part in (y, eos)])
        _, _, outputs = self.decoder(*self.encode(xs), before)
        scores = self.output(F.concat(outputs, axis=0))
        loss = F.softmax_cross_entropy(scores, after)
        # Means over words: reports weigh by the number of words, too.
        report = {"loss": loss, "accuracy": F.accuracy(scores, after)}
        report = {key: (value, len(after)) for key, value in report.items()}
        chainer.report(report, self)
        return loss

    def translate(self, xs, max_length):
        """Return the most likely next words, one after the other, as lists."""
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            hidden, cell = self.encode(xs)
            words = self.xp.full(len(xs), EOS, self.xp.int32)
            steps = []
            for _ in range(max_length):
                embedded = F.split_axis(self.embed_y(words), len(xs), 0)
                hidden, cell, outputs = self.decoder(hidden, cell, embedded)
                scores = self.output(F.concat(outputs, axis=0)).array
                words = scores.argmax(axis=1).astype(self.xp.int32)
                steps.append(cuda.to_cpu(words).tolist())
        return [
            list(itertools.takewhile(lambda word: word != EOS, line))
            for line in zip(*steps, strict=True)
        ]


def count_words(xs, ys):
    """Return how many words a batch's loss is the mean of."""
    return sum(len(y) + 1 for y in ys)


def digest(model):
    """Return a digest of every bit of the parameters."""
    sha256 = hashlib.sha256()
    for path, param in sorted(model.namedparams()):
        sha256.update(path.encode() + cuda.to_cpu(param.array).tobytes())
    return sha256.hexdigest()


def main():
    parser = argparse.ArgumentParser(description="Translation, data parallel")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--source", help="text file, one sentence a line")
    parser.add_argument("--target", help="the translation of each line")
    parser.add_argument("--vocabulary", type=int, default=40000, help="words at most")
    parser.add_argument("--max-length", type=int, default=50, help="words a sentence")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--unit", type=int, default=1024)
    parser.add_argument("--alpha", type=float, default=1e-3, help="step size of Adam")
    parser.add_argument("--batchsize", type=int, default=256, help="of all ranks")
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/seq2seq")
    parser.add_argument("--smoke", action="store_true", help="a small model and data")
    args = parser.parse_args()
    if args.smoke:
        args.layer, args.unit, args.batchsize, args.epoch = 1, 48, 24, 2
        args.alpha = 1e-2

    comm = chainermn_ng.create_communicator(args.communicator)
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)

    # The vocabularies decide on the sizes of the layers: all ranks take rank 0's.
    train, test, words = load(args) if comm.rank == 0 else (None, None, None)
    words = comm.bcast_obj(words)
    n_source, n_target = (len(known) + 2 for known in words)
    train = chainermn_ng.scatter_dataset(train, comm, shuffle=True, seed=args.seed)
    test = chainermn_ng.scatter_dataset(test, comm)
    batchsize = max(args.batchsize // comm.size, 1)
    train_iter = chainer.iterators.SerialIterator(train, batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, batchsize, repeat=False, shuffle=False
    )

    with chainermn_ng.shared_seed(args.seed):
        model = Seq2seq(args.layer, n_source, n_target, args.unit)
    model.to_device(device)
    optimizer = chainermn_ng.create_multi_node_optimizer(
        chainer.optimizers.Adam(alpha=args.alpha),
        comm,
        count_samples=count_words,
    )
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))

    updater = training.StandardUpdater(train_iter, optimizer, convert, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, convert, device)
    trainer.extend(chainermn_ng.create_multi_node_evaluator(evaluator, comm))
    columns = ["epoch", "main/loss", "main/accuracy"]
    columns += ["validation/main/loss", "validation/main/accuracy", "elapsed_time"]
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    digests = comm.allgather_obj(digest(model))
    if comm.rank == 0:
        for rank, text in enumerate(digests):
            print(f"parameters (SHA-256) of rank {rank}: {text}")
        sources, _ = convert(test[:4], device)
        known = ["", "?", *words[1]]
        for line in model.translate(sources, args.max_length):
            print("translated:", *(known[word] for word in line))


if __name__ == "__main__":
    main()
