"""Multi-process training for Chainer on today's Python, NumPy and MPI."""

from chainermn_ng import compat

compat.prepare_chainer()  # before anything below imports chainer

from chainermn_ng import global_except_hook  # noqa: E402

global_except_hook._add_hook_if_enabled()
