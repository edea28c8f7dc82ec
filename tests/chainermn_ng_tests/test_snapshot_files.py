import json
import random
import zipfile

import chainer
import numpy as np
import pytest

from chainermn_ng.datasets import SeededOrder
from chainermn_ng.extensions import generator_states, snapshot_files


def arrays():
    return {
        "updater/model:main/W": np.arange(6.0, dtype="f").reshape(2, 3),
        "file": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.asarray(3),
        "nothing": np.asarray(None),
        "text": np.asarray("words"),
        "empty": np.zeros((0, 3), np.float16),
    }


@pytest.fixture
def path(tmp_path):
    snapshot_files.write_temporary(tmp_path / "s", arrays(), {"iteration": 4})
    return tmp_path / "s"


@pytest.mark.parallel(1)
def test_what_was_written_comes_back(path):
    with snapshot_files.open_checked(path) as npz:
        assert snapshot_files.read_meta(npz) == {"iteration": 4}
        for name, array in arrays().items():
            assert npz[name].dtype == array.dtype
            assert npz[name].shape == array.shape
            assert npz[name].tolist() == array.tolist()
    with snapshot_files.open_checked(path.read_bytes()) as npz:
        assert npz["scalar"] == 3


@pytest.mark.parallel(1)
def test_chainer_and_numpy_and_unzip_read_it(path):
    class Target:
        def serialize(self, serializer):
            self.value = serializer("W", np.zeros((2, 3), "f"))

    target = Target()
    chainer.serializers.load_npz(path, target, path="updater/model:main/")
    assert (target.value == arrays()["updater/model:main/W"]).all()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parallel(1)
def test_every_cut_and_a_flip_of_any_bit_is_found(path):
    content = path.read_bytes()
    for n_bytes in [*range(0, len(content), 97), len(content) - 1]:
        with (
            pytest.raises(snapshot_files.DamagedFileError),
            snapshot_files.open_checked(content[:n_bytes]),
        ):
            pass
    places = [*range(0, len(content), 13), *range(len(content) - 100, len(content))]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with (
            pytest.raises(snapshot_files.DamagedFileError),
            snapshot_files.open_checked(bytes(damaged)),
        ):
            pass
    with (
        pytest.raises(snapshot_files.DamagedFileError),
        snapshot_files.open_checked(content + b"\0"),
    ):
        pass


@pytest.mark.parallel(1)
def test_a_failed_write_leaves_nothing(tmp_path):
    class Unwritable:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        snapshot_files.write_temporary(tmp_path / "s", {"a": Unwritable()}, {})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "s").write_text("mine")
    with pytest.raises(FileExistsError):
        snapshot_files.write_temporary(tmp_path / "s", {}, {})
    assert (tmp_path / "s").read_text() == "mine"


class Holder:
    def __init__(self, seed):
        self.list = [np.random.default_rng(seed), np.random.RandomState(seed)]
        self.python = random.Random(seed)
        self.other = np.random.Generator(np.random.MT19937(seed))
        self.again = self.python
        self.method = self.python.random
        self.all = np.random.mtrand._rand

    def draw(self):
        modern, legacy = self.list
        return [
            modern.normal(),
            modern.integers(1 << 40),
            legacy.normal(),  # leaves a second value waiting
            self.python.gauss(0, 1),
            self.other.random(),
            random.random(),
            random.gauss(0, 1),
            np.random.normal(),
            np.random.permutation(9).tolist(),
        ]


@pytest.mark.parallel(1)
def test_generators_go_on_where_they_were():
    before, after = Holder(1), Holder(2)
    before.draw()
    states = json.loads(json.dumps(generator_states.capture({"main": before})))
    expected = [before.draw() for _ in range(3)]
    assert generator_states.restore(states, {"main": after}) == []
    assert [after.draw() for _ in range(3)] == expected
    assert sorted(states["own"]) == [
        "main.list[0]",
        "main.list[1]",
        "main.other",
        "main.python",
    ]


@pytest.mark.parallel(1)
def test_generators_that_came_went_or_changed_are_named():
    states = generator_states.capture({"a": [np.random.default_rng(0), Holder(1)]})
    other = {"a": [np.random.RandomState(0), np.random.RandomState(1)]}
    lost = generator_states.restore(states, other)
    assert "the random generator a[0]" in lost
    assert "the random generator a[1].python" in lost
    assert "the random generator a[1], which is new" in lost


@pytest.mark.parallel(1)
def test_seeded_order_is_a_function_of_the_order_before():
    first, again, other = SeededOrder(1), SeededOrder(1), SeededOrder(2)
    order = np.arange(50)
    for _ in range(20):
        following = first(order, 0)
        assert sorted(following) == list(range(50))
        assert (following == again(order.astype(np.int32), 7)).all()
        assert (following != order).any()
        assert (following != other(order, 0)).any()
        order = following
    with pytest.raises(ValueError, match="seed -1"):
        SeededOrder(-1)
