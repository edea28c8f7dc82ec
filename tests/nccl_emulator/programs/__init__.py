"""What the ranks run in the emulator's tests: functions that import without pytest."""
