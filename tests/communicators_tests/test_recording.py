"""Recorders of the parts of collectives."""

import threading

import pytest

from communicators.recording import BACKGROUND_LANE, SpanRecorder, recorded_span


def test_a_context_is_recorded_with_its_details():
    recorder = SpanRecorder()
    with recorded_span(recorder, "pack", bucket=3):
        pass
    (span,) = recorder.spans
    assert (span.name, span.lane, span.details) == ("pack", "main", {"bucket": 3})
    assert span.start_ns <= span.end_ns


def test_what_fails_is_not_recorded():
    recorder = SpanRecorder()
    with pytest.raises(KeyError), recorded_span(recorder, "pack"):
        raise KeyError
    assert recorder.spans == []


def test_nobody_listens():
    with recorded_span(None, "pack"):
        pass


def test_other_threads_have_a_lane_of_their_own():
    recorder = SpanRecorder()

    def work():
        with recorded_span(recorder, "pack"):
            pass
        recorder.record("flight", 1, 2, "communication")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [s.lane for s in recorder.spans] == [BACKGROUND_LANE, "communication"]
