"""Train a translator of sentences: the encoder on one rank, the decoder on another.

    mpiexec -n 2 python examples/seq2seq/seq2seq_model_parallel.py --source en.txt \\
        --target fr.txt
    mpiexec -n 2 python examples/seq2seq/seq2seq_model_parallel.py --smoke

The states of the encoder travel from rank 1 to rank 0, whose decoder begins with them;
their gradients travel back. The recurrent links do that by themselves once
create_multi_node_n_step_rnn has told them from whom and to whom. Both ranks draw the
same batches: a synchronized iterator has the order of rank 0. Each rank has parameters
and an optimizer of its own. The other program of this folder splits by sentences.
"""

import argparse

import chainermn_ng

import chainer
from chainer import functions as F
from chainer import links as L
from chainer import training
from chainer.training import extensions
from sentences import EOS, convert, load

DECODER, ENCODER = 0, 1  # ranks; the loss is the decoder's, and rank 0 reports


class Encoder(chainer.Chain):
    """Reads the source sentences and sends its last states away."""

    def __init__(self, comm, n_layers, n_words, n_units):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_words, n_units)
            self.rnn = chainermn_ng.links.create_multi_node_n_step_rnn(
                L.NStepLSTM(n_layers, n_units, n_units, 0.1), comm, rank_out=DECODER
            )

    def forward(self, xs, ys):
        """Return what backward() starts from on this rank: it stands for the states."""
        *_, sent = self.rnn([self.embed(x) for x in xs])
        return sent


class Decoder(chainer.Chain):
    """Begins with the states it is sent and predicts each next word."""

    def __init__(self, comm, n_layers, n_words, n_units):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_words, n_units)
            self.rnn = chainermn_ng.links.create_multi_node_n_step_rnn(
                L.NStepLSTM(n_layers, n_units, n_units, 0.1), comm, rank_in=ENCODER
            )
            self.output = L.Linear(n_units, n_words)

    def forward(self, xs, ys):
        """Return the mean loss over all words, given the right words before each."""
        eos = self.xp.array([EOS], self.xp.int32)
        before = [self.embed(self.xp.concatenate((eos, y))) for y in ys]
        after = self.xp.concatenate([part for y in ys for part in (y, eos)])
        *_, outputs, _ = self.rnn(before)
        scores = self.output(F.concat(outputs, axis=0))
        loss = F.softmax_cross_entropy(scores, after)
        # Means over words: reports weigh by the number of words, too.
        report = {"loss": loss, "accuracy": F.accuracy(scores, after)}
        report = {key: (value, len(after)) for key, value in report.items()}
        chainer.report(report, self)
        return loss


def main():
    parser = argparse.ArgumentParser(description="Translation, model parallel")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("--source", help="text file, one sentence a line")
    parser.add_argument("--target", help="the translation of each line")
    parser.add_argument("--vocabulary", type=int, default=40000, help="words at most")
    parser.add_argument("--max-length", type=int, default=50, help="words a sentence")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--unit", type=int, default=1024)
    parser.add_argument("--alpha", type=float, default=1e-3, help="step size of Adam")
    parser.add_argument("--batchsize", type=int, default=128)
    parser.add_argument("--epoch", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", "-g", action="store_true")
    parser.add_argument("--out", default="result/seq2seq_model_parallel")
    parser.add_argument("--smoke", action="store_true", help="a small model and data")
    args = parser.parse_args()
    if args.smoke:
        args.layer, args.unit, args.batchsize, args.epoch = 1, 48, 24, 2
        args.alpha = 1e-2

    comm = chainermn_ng.create_communicator(args.communicator)
    if comm.size != 2:
        raise SystemExit("encoder and decoder: start it by mpiexec -n 2")
    device = chainermn_ng.choose_device(comm, gpu=args.gpu)
    chainermn_ng.set_seed(args.seed, comm)

    train, test, words = chainermn_ng.run_once_per_host(comm, load, args)
    n_source, n_target = (len(known) + 2 for known in words)
    if comm.rank == ENCODER:
        model = Encoder(comm, args.layer, n_source, args.unit)
    else:
        model = Decoder(comm, args.layer, n_target, args.unit)
    model.to_device(device)
    optimizer = chainer.optimizers.Adam(alpha=args.alpha)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))

    train_iter = chainermn_ng.iterators.create_synchronized_iterator(
        chainer.iterators.SerialIterator(train, args.batchsize), comm
    )
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )
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


if __name__ == "__main__":
    main()
