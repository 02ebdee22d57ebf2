"""The sizes that steps are padded to."""

from lowlat.engine.step_rows import padded_rows


def test_few_sizes_and_little_padding():
    sizes = {rows: padded_rows(rows) for rows in range(1, 4097)}
    assert all(sizes[rows] == rows for rows in range(1, 17))
    assert all(rows <= size <= rows * 9 / 8 + 1 for rows, size in sizes.items())
    assert all(sizes[size] == size for size in sizes.values())
    assert [sizes[rows] for rows in (17, 33, 257, 512, 513)] == [18, 36, 288, 512, 576]
    assert len(set(sizes.values())) == 16 + 8 * 8
