"""What Chainer asks of ``pkg_resources``, answered by today's standard library.

Chainer uses four functions and three exceptions of it: at import, to look for
versions of CuPy and iDeep that it does not know, and in ``chainer.testing``, to skip
tests. setuptools 81 stopped shipping the package.
"""

from __future__ import annotations

import re
import types
from importlib import metadata

_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


class ResolutionError(Exception):
    """A requirement is not met; as ``pkg_resources.ResolutionError``."""


class DistributionNotFound(ResolutionError):
    """The required distribution is not installed."""


class VersionConflict(ResolutionError):
    """The required distribution is installed in a version outside the range."""


def get_distribution(name: str) -> types.SimpleNamespace:
    """Return ``project_name`` and ``version`` of an installed distribution.

    Raises:
        DistributionNotFound: no such distribution is installed.
    """
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise DistributionNotFound(
            f"The {name!r} distribution was not found and is required"
        ) from None
    return types.SimpleNamespace(project_name=name, version=version)


def require(*requirements: str) -> list[types.SimpleNamespace]:
    """Check that requirements such as ``"numpy>=1.10"`` are installed.

    The requirements of what was found are not followed: an installer has done that.
    Pre-releases count, as in ``pkg_resources``.

    Raises:
        DistributionNotFound: one is not installed.
        VersionConflict: one is installed in another version.
    """
    found = []
    for text in requirements:
        name = _NAME.match(text)
        if name is not None and ";" not in text:
            # What is not there needs no range to be read: Chainer's import asks for
            # every CuPy that there has been, and the parser takes 5 ms to import.
            get_distribution(name[1])
        from packaging.requirements import Requirement

        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        distribution = get_distribution(requirement.name)
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            raise VersionConflict(
                f"{requirement.name} {distribution.version} is installed but "
                f"{requirement} is required"
            )
        found.append(distribution)
    return found


class WorkingSet:
    """All installed distributions; as ``pkg_resources.WorkingSet()``."""

    def require(self, *requirements: str) -> list[types.SimpleNamespace]:
        """See :func:`require`."""
        return require(*requirements)


# What ``import pkg_resources`` gives Chainer's modules, and only them.
pkg_resources = types.SimpleNamespace(
    ResolutionError=ResolutionError,
    DistributionNotFound=DistributionNotFound,
    VersionConflict=VersionConflict,
    WorkingSet=WorkingSet,
    get_distribution=get_distribution,
    require=require,
)
