"""Letting operations on to a link in the order in which they began, a few at a time.

Messages that are sent at once share a link and arrive at once: then nothing is left to
be sent while their results are spread in the hosts and the next ones are made. One
after the other they take as long, and all but the last leave their ranks time for the
rest while the link goes on.
"""

from __future__ import annotations

from collections import deque

#: Operations on the link at once: while one begins or ends, the other fills the link.
N_ON_LINK = 2


class Turnstile:
    """The line before one link.

    All ranks line up the same operations in the same order, so that those on the link
    are the same ones everywhere, sooner or later.
    """

    def __init__(self, n_on_link: int = N_ON_LINK) -> None:
        self._n_on_link = n_on_link
        self._line: deque[Place] = deque()
        self._n_inside = 0

    def line_up(self) -> Place:
        """Take the last place. To be given up by :meth:`Place.leave` in any case."""
        place = Place(self)
        self._line.append(place)
        return place

    def lets_in(self, place: Place) -> bool:
        """Let it in if it is the first in the line and there is room."""
        if self._n_inside >= self._n_on_link or self._line[0] is not place:
            return False
        self._line.popleft()
        self._n_inside += 1
        return True

    def let_out(self) -> None:
        """Make room for the next one."""
        self._n_inside -= 1

    def forget(self, place: Place) -> None:
        """Take one out of the line that does not wait any more."""
        self._line.remove(place)


class Place:
    """One operation's place in a line; steps yield it as they yield requests of MPI.

    A context, which it leaves at the end.
    """

    def __init__(self, turnstile: Turnstile) -> None:
        self._turnstile = turnstile
        self._is_inside = False
        self._is_over = False

    def Test(self) -> bool:
        """Go on to the link if it is this one's turn; tell whether it waits no more."""
        if not self._is_inside and not self._is_over:
            self._is_inside = self._turnstile.lets_in(self)
        return self._is_inside or self._is_over

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave the link, or the line. Safe to call twice."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_inside:
            self._turnstile.let_out()
        else:
            self._turnstile.forget(self)
