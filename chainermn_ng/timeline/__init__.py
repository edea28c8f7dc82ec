"""Recorded training steps: their clocks, their trace files, what they say."""
