"""The texts of errors that all ranks share."""

import re

import pytest
from helpers.errors import assert_all_raise, raised_by
from helpers.ranks import assert_all_ranks

from communicators.difference_text import Report, difference_text, failure_text


def report(label="bcast", why=None, place=""):
    failure = ("ValueError", why) if why else None
    return Report(1, label, "", failure, place=place)


@pytest.mark.parametrize(
    ("why", "text"), [("Bad.", "Bad"), ("Bad", "Bad"), ("bad ...", "bad ...")]
)
def test_a_sentence_goes_on_without_its_stop(why, text):
    places = [report(why=why, place="a:1"), report(place="a:1")]
    expected = f"bcast failed on rank 0: {text}; called from a:1"
    assert failure_text(places) == expected
    without = failure_text([report(why=why), report()])
    assert without == f"bcast failed on rank 0: {why}"


def test_each_of_several_errors_goes_on_without_its_stop():
    reports = [report(why="Bad.", place="a:1"), report(why="Worse.", place="a:2")]
    assert failure_text(reports) == (
        "bcast failed on rank 0: Bad; on rank 1: Worse; called from a:1 on rank 0, "
        "a:2 on rank 1"
    )
    reports = [report("x", "Bad.", "a:1"), report("y", "Worse.", "a:1"), report("x")]
    text = difference_text(reports)
    assert text.endswith("failed with Bad; rank 1 failed with Worse; called from a:1")


@pytest.mark.parallel([1, 2])
def test_it_is_what_programs_see(comm):
    def fail():
        error = ValueError("No such thing.") if comm.rank == 0 else None
        comm.agree("test", error=error)

    assert_all_raise(comm, fail, ValueError, "No such thing; called from ")
    text = str(raised_by(fail))
    assert_all_ranks(comm, not re.search(r"[.];", text), text)
