"""Numbers of bytes as people write them."""

import pytest

from communicators.byte_sizes import format_bytes, parse_bytes, parse_sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("1KiB", 1024),
        ("1.5 MiB", 1572864),
        ("2GiB", 2147483648),
        ("1kB", 1000),
        ("1 mb", 1000000),
        ("7B", 7),
    ],
)
def test_bytes_are_read(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "KiB", "1K", "-1", "0.3B", "1 KiB 2", "1e6"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


def test_ranges_go_in_steps_of_four_and_lists_keep_their_order():
    assert parse_sizes("1KiB:64KiB") == [1024, 4096, 16384, 65536]
    assert parse_sizes("1000:20000") == [1000, 4000, 16000]
    assert parse_sizes("1MB, 64KiB,1MB") == [1000000, 65536]


@pytest.mark.parametrize("text", ["4KiB:1KiB", "0", "1:2:3", ""])
def test_malformed_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"number of bytes|SMALL:LARGE of 1 byte"):
        parse_sizes(text)


def test_bytes_are_written_as_binary_multiples_where_that_is_exact():
    assert format_bytes(512) == "512 B"
    assert format_bytes(1024) == "1 KiB"
    assert format_bytes(64 * 2**20) == "64 MiB"
    assert format_bytes(102228128) == "102.2 MB"
