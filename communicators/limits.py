"""Default limits that several modules share."""

#: How long a rank waits for the others, in seconds.
DEFAULT_TIMEOUT_S = 600.0
