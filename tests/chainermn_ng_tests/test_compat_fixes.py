"""What NumPy 2 broke inside Chainer works again."""

from __future__ import annotations

import types

import numpy as np
import pytest

from chainermn_ng import compat

compat.prepare_chainer()

import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402
import chainer.links as L  # noqa: E402

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["uint8", "uint16", "uint32", "uint64", "int8", "int32", "int64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_pad_sequence_takes_a_negative_pad(dtype):
    xs = [np.arange(3).astype(dtype), np.ones(1, dtype)]
    y = F.pad_sequence(xs, padding=-1).array
    assert y.dtype == dtype
    assert (y[1, 1:] == np.array(-1).astype(dtype)).all()


@pytest.mark.parametrize("padding", [float("inf"), -1, 0.5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pad_sequence_of_floats(dtype, padding):
    y = F.pad_sequence([np.ones(2, dtype), np.ones(1, dtype)], padding=padding).array
    assert y.dtype == dtype
    assert y[1, 1] == padding


@pytest.mark.parametrize("dtype", INTEGERS)
def test_concat_examples_takes_a_negative_pad(dtype):
    batch = [np.ones((2, 1), dtype), np.ones((1, 3), dtype)]
    y = chainer.dataset.concat_examples(batch, padding=-1)
    assert y.dtype == dtype
    assert y.shape == (2, 2, 3)
    assert y[1, 1, 0] == np.array(-1).astype(dtype)
    assert (y[0, :, :1] == 1).all()


def test_concat_examples_of_other_ranks_fails():
    with pytest.raises(ValueError, match="zip"):
        chainer.dataset.concat_examples([np.ones(2), np.ones((2, 2))], padding=0)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8"])
def test_constants_outside_of_the_dtype_wrap(dtype):
    x = chainer.Variable(np.ones(2, dtype))
    y = (x + (-1)) * -1 - 300
    assert y.dtype == dtype
    assert (y.array == np.array(-300).astype(dtype)).all()


def test_division_by_a_numpy_constant_is_precise():
    x = chainer.Variable(np.array([3.0]))
    assert (x / np.float32(3)).array[0] == 1.0
    assert (x / np.float32(3)).dtype == np.float64


@pytest.mark.parametrize("label_dtype", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("double", [True, False])
def test_softmax_cross_entropy(dtype, label_dtype, double):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (300, 5)).astype(dtype)
    t = rng.integers(-1, 5, 300).astype(label_dtype)
    v = chainer.Variable(x)
    loss = F.softmax_cross_entropy(v, t, enable_double_backprop=double)
    loss.backward()
    z = x.astype("d")
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    expected = -log_p[np.arange(300), t][t >= 0].mean()
    assert loss.dtype == v.grad.dtype == dtype
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(float(loss.array), expected, rtol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS)
def test_det_scales(dtype):
    x = (np.eye(3) + 0.1).astype(dtype)
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    det = F.det(2 * x)
    assert det.dtype == dtype
    np.testing.assert_allclose(det.array, 8 * F.det(x).array, rtol=tolerance)


def test_debug_print_names_the_device_as_ever():
    text = chainer.Variable(np.zeros(3, "f")).debug_print()
    assert "- device: CPU\n" in text
    assert chainer.Variable(None).debug_print().count("device: None") == 1


def test_categorical_log_prob_and_kl():
    p = np.array([[0.2, 0.8], [0.5, 0.5]], "f")
    q = np.array([[0.4, 0.6], [0.1, 0.9]], "f")
    one, two = (
        chainer.distributions.Categorical(p),
        chainer.distributions.Categorical(q),
    )
    x = np.array([1, 0])
    np.testing.assert_allclose(one.log_prob(x).array, np.log([0.8, 0.5]), rtol=1e-5)
    expected = (p * np.log(p / q)).sum(axis=1)
    kl = chainer.kl_divergence(one, two)
    np.testing.assert_allclose(kl.array, expected, rtol=1e-5)
    sample = one.sample(5)
    assert one.log_prob(sample).shape == (5, 2)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_resize_images(mode, align_corners):
    x = chainer.Variable(np.arange(12, dtype="f").reshape(1, 1, 3, 4))
    y = F.resize_images(x, (3, 4), mode=mode, align_corners=align_corners)
    F.sum(y).backward()
    assert y.dtype == x.grad.dtype == np.float32
    if not (mode == "nearest" and align_corners):
        np.testing.assert_allclose(y.array, x.array)


def test_as_strided_backward():
    x = chainer.Variable(np.arange(4, dtype="f"))
    F.sum(F.as_strided(x, (3, 2), (1, 1), 0)).backward()
    np.testing.assert_array_equal(x.grad, [1, 2, 2, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_fix_and_fmod(dtype):
    x = np.array([-1.5, 2.5, 0.0], dtype)
    assert F.fix(x).dtype == dtype
    np.testing.assert_array_equal(F.fix(x).array, [-1, 2, 0])
    v, w = chainer.Variable(x), chainer.Variable(np.full(3, 2, dtype))
    F.sum(F.fmod(v, w)).backward()
    np.testing.assert_array_equal(w.grad, [0, -1, 0])


@pytest.mark.parametrize("in_size", [3, None])
def test_maxout_hands_its_shape_to_initializers(in_size):
    shapes = []

    def initial_w(array):
        shapes.append(array.shape)
        array[...] = 2

    def initial_bias(array):
        shapes.append(array.shape)
        array[...] = 1

    link = L.Maxout(in_size, 4, 2, initial_w, initial_bias)
    y = link(np.ones((1, 3), "f"))
    assert set(shapes) == {(4, 2, 3), (4, 2)}
    np.testing.assert_array_equal(y.array, np.full((1, 4), 7, "f"))


def clip(gradients, hook):
    link = chainer.Link()
    with link.init_scope():
        for i, gradient in enumerate(gradients):
            setattr(link, f"p{i}", chainer.Parameter(np.ones_like(gradient)))
            getattr(link, f"p{i}").grad = gradient.copy()
    optimizer = chainer.optimizers.SGD().setup(link)
    optimizer.add_hook(hook)
    optimizer.call_hooks("pre")
    return [getattr(link, f"p{i}").grad for i in range(len(gradients))]


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_clipping_of_many_parameters(dtype):
    # The squared norms fit float16 one by one, their sum does not.
    gradients = [np.full(100, 20, dtype) for _ in range(4)]
    clipped = clip(gradients, chainer.optimizer_hooks.GradientClipping(1.0))
    norm = np.sqrt(sum((g.astype("d") ** 2).sum() for g in clipped))
    assert norm == pytest.approx(1, rel=2e-3)
    assert all(g.dtype == dtype for g in clipped)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_lars(dtype):
    hook = chainer.optimizer_hooks.GradientLARS(weight_decay=0.5)
    zero, some = clip([np.zeros(4, dtype), np.full(4, 3, dtype)], hook)
    np.testing.assert_allclose(zero, 0.5 * 2 / (0.5 * 2), rtol=2e-3)
    np.testing.assert_allclose(some, 3.5 * 2 / (6 + 0.5 * 2), rtol=2e-3)
    assert zero.dtype == some.dtype == dtype


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("zero_dim", [True, False])
def test_summary_of_many_values(dtype, zero_dim):
    summary = chainer.reporter.Summary()
    values = np.array([100.1, 50.1], dtype)
    for i in range(5000):
        value = values[i % 2]
        summary.add(np.array(value) if zero_dim else value)
    mean, std = summary.make_statistics()
    assert mean == pytest.approx(values.astype("d").mean(), rel=1e-9)
    assert std == pytest.approx(values.astype("d").std(), rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "name", ["SGD", "MomentumSGD", "Adam", "AdamW", "AMSBound", "RMSprop", "AdaDelta"]
)
def test_training_keeps_its_dtype(dtype, name):
    with chainer.using_config("dtype", np.dtype(dtype)):
        model = L.Classifier(
            chainer.Sequential(
                L.Linear(4), L.BatchNormalization(4), F.relu, L.Linear(3)
            )
        )
        optimizer = getattr(chainer.optimizers, name)().setup(model)
        if dtype == "float16":
            optimizer.use_fp32_update()
            optimizer.loss_scaling(scale=8.0)
        x = np.random.default_rng(0).uniform(0, 1, (8, 5)).astype(dtype)
        for _ in range(3):
            optimizer.update(model, x, np.arange(8) % 3)
    assert model.loss.dtype == dtype
    for parameter in model.params():
        assert parameter.dtype == parameter.grad.dtype == dtype
        assert np.isfinite(parameter.array).all()


def cuda_module(major):
    """Return what the fix changes of chainer.backends.cuda, with that CuPy."""
    return types.SimpleNamespace(
        available=True,
        _cupy_major=major,
        check_cuda_available=lambda: None,
        cupy=np,
        cupyx=types.SimpleNamespace(scatter_add="deprecated", rsqrt="kept"),
    )


@pytest.mark.parametrize(("major", "silent"), [(13, False), (14, True)])
def test_no_advice_to_install_cudnn_where_cupy_has_none(major, silent):
    module = cuda_module(major)
    compat.FIXES["chainer.backends.cuda"](module)
    check = module.check_cuda_available
    assert getattr(check, "_already_warned", False) is silent


def test_cupy_adds_at_indices_without_its_deprecated_function():
    module = cuda_module(14)
    cupyx = module.cupyx
    compat.FIXES["chainer.backends.cuda"](module)
    array = np.zeros(3)
    module.cupyx.scatter_add(array, [0, 2, 2], 1.0)
    assert array.tolist() == [1, 0, 2]
    assert module.cupyx.rsqrt == "kept"
    assert cupyx.scatter_add == "deprecated"
    older = cuda_module(13)
    compat.FIXES["chainer.backends.cuda"](older)
    assert older.cupyx.scatter_add == "deprecated"


@pytest.mark.parametrize(
    "slices", [(0,), (slice(1, None), 2), ([0, 2, 2],), ([0, 2, 2], [1, 1, 1])]
)
def test_the_gradient_of_get_item_needs_no_scatter_add(monkeypatch, slices):
    from chainer.functions.array import get_item

    from chainermn_ng.compat.numpy_names import NumpyView

    x = np.arange(12, dtype="f").reshape(3, 4)
    gy = np.ones_like(x[slices])
    expected = np.zeros_like(x)
    np.add.at(expected, slices, gy)
    # A module that is not NumPy, as CuPy: its arrays have no scatter_add.
    backend = types.SimpleNamespace(get_array_module=lambda *arrays: NumpyView({}))
    monkeypatch.setattr(get_item, "backend", backend)
    (got,) = get_item.GetItemGrad(slices, x.shape).forward((gy,))
    assert got.dtype == x.dtype
    assert np.array_equal(got, expected)


def test_a_loss_over_no_samples_has_a_backward_pass():
    """Chainer's own returned one gradient too many."""
    x = chainer.Variable(np.zeros((0, 3), "f"))
    loss = F.softmax_cross_entropy(x, np.zeros(0, "i"))
    loss.backward()
    assert loss.array == 0
    assert x.grad.shape == (0, 3)
