"""The rows of the comparison, one subject a file."""
