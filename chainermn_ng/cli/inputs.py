"""Input that cannot be used: its exit status, and files that cannot be written."""

from __future__ import annotations

import os
import pathlib

import click


class BadInput(click.ClickException):
    """The input cannot be used; the command ends with status 2."""

    exit_code = 2


def check_folder(option: str, path: str) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Args:
        option: that named it, for the error.
        path: of the file.

    Raises:
        ValueError: its folder is not there, or not writable.
    """
    folder = pathlib.Path(path).resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: cannot write to {folder}")
