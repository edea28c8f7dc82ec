"""The line before a link: who may use it, and when."""

from __future__ import annotations

import pytest

from communicators.transports.turnstile import Turnstile


def test_operations_go_on_in_the_order_in_which_they_lined_up():
    turnstile = Turnstile(2)
    places = [turnstile.line_up() for _ in range(4)]
    assert [place.Test() for place in reversed(places)] == [False, False, False, True]
    assert [place.Test() for place in places] == [True, True, False, False]
    assert places[0].Test()  # it stays there
    places[0].leave()
    assert not places[3].Test()
    assert places[2].Test()
    places[1].leave()
    places[1].leave()  # makes room once
    assert places[3].Test()
    assert not turnstile.line_up().Test()


def test_one_that_never_goes_on_does_not_hold_up_the_others():
    turnstile = Turnstile(1)
    first, second = turnstile.line_up(), turnstile.line_up()
    with pytest.raises(KeyError), first:
        raise KeyError
    assert first.Test()  # waits no more
    assert second.Test()
    second.leave()
    assert turnstile.line_up().Test()


def test_one_that_has_left_is_not_waited_for():
    place = Turnstile(1).line_up()
    place.leave()
    assert place.Test()
