"""What the ranks run. Each prints one ``REPORT`` line with an entry a rank."""
