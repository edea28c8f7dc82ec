import chainer
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions
from helpers.ranks import assert_all_ranks
from helpers.trainings import recorded, shared_folder

import chainermn_ng
from chainermn_ng.optimizers.master_weights import load_master_weights


def trainer_of(comm, folder, n_iterations, kind):
    """Return a trainer whose steps, 1e-4 of 1, are lost in float16."""
    with chainer.using_config("dtype", np.float16):
        model = chainer.links.Linear(1, 1, nobias=True, initialW=1.0)
    optimizer = chainer.optimizers.MomentumSGD(1e-4, momentum=0.5)
    if kind != "plain":
        optimizer = chainermn_ng.create_multi_node_optimizer(
            optimizer, comm, double_buffering=kind == "double_buffering"
        )
    optimizer.use_fp32_update()
    optimizer.setup(model)
    iterator = chainer.iterators.SerialIterator([np.ones(1, "e")] * 4, 1, shuffle=False)
    updater = training.StandardUpdater(
        iterator, optimizer, loss_func=lambda x: chainer.functions.sum(model(x))
    )
    return training.Trainer(updater, (n_iterations, "iteration"), out=str(folder))


def weights_after(comm, folder, n_iterations, kind, attach):
    trainer = trainer_of(comm, folder, n_iterations, kind)
    attach(trainer)
    _, texts = recorded(trainer.run)
    if hasattr(trainer.updater.get_optimizer("main"), "flush"):
        trainer.updater.get_optimizer("main").flush()
    comm.barrier()
    parameter = trainer.updater.get_optimizer("main").target.W
    master = parameter.update_rule._fp32_param
    return parameter.array.item(), master.array.item(), texts


@pytest.mark.parallel([1, 2])
@pytest.mark.parametrize("kind", ["multi_node", "double_buffering", "plain"])
@pytest.mark.parametrize("by", ["checkpointer", "multi_node_snapshot"])
def test_small_float32_steps_survive_a_resume(comm, tmp_path, kind, by):
    folder = shared_folder(comm, tmp_path)

    def attach(trainer):
        if by == "checkpointer":
            extension = chainermn_ng.create_multi_node_checkpointer("run", comm)
            extension.maybe_load(trainer)
        else:
            extension = extensions.snapshot(autoload=True)
            extension = chainermn_ng.extensions.multi_node_snapshot(comm, extension, [])
        trainer.extend(extension, trigger=(2, "iteration"))

    unbroken = weights_after(comm, folder / "a", 12, kind, lambda trainer: None)
    for n_iterations in (2, 4, 6, 8, 10, 12):
        resumed = weights_after(comm, folder / "b", n_iterations, kind, attach)
    assert_all_ranks(comm, resumed == unbroken, f"{resumed} {unbroken}")
    assert unbroken[0] < 1


@pytest.mark.parallel([1, 2])
def test_a_snapshot_without_float32_values_loads_with_a_warning(comm, tmp_path):
    trainer = trainer_of(comm, tmp_path, 3, "multi_node")
    trainer.run()
    optimizer = trainer.updater.get_optimizer("main")
    old = {}
    optimizer.actual_optimizer.serialize(chainer.serializers.DictionarySerializer(old))
    # The values of before the load must not come back at the next step.
    again = trainer_of(comm, tmp_path, 3, "multi_node")
    again.run()
    optimizer = again.updater.get_optimizer("main")
    reader = chainer.serializers.NpzDeserializer(old)
    _, texts = recorded(lambda: optimizer.serialize(reader))
    told = len(texts) == 1 and "float32 values of 1 parameters (/W" in texts[0]
    assert_all_ranks(comm, told == (comm.rank == 0), f"{texts}")
    assert optimizer.target.W.update_rule._fp32_param is None


@pytest.mark.parametrize(("dtype", "lost"), [("float16", ["/W"]), ("float32", [])])
def test_what_a_parameter_lost_that_is_not_initialized(dtype, lost):
    model = chainer.links.Linear(None, 1, nobias=True)
    optimizer = chainer.optimizers.SGD()
    optimizer.use_fp32_update()
    optimizer.setup(model)
    model.W.update_rule.t = 1
    reader = chainer.serializers.NpzDeserializer({})
    with chainer.using_config("dtype", np.dtype(dtype)):
        assert load_master_weights(optimizer, reader) == lost
