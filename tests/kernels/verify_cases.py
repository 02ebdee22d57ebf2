"""Random inputs for the kernels of steps that check guesses, on any device, and plain PyTorch to compare with."""

from __future__ import annotations

from typing import Any

import torch
from kernel_cases import PagedCase

from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DeviceStep
from lowlat.layers.verify import NO_END, SlotTables


def drawn_logits(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of every kind: ordinary ones, ties, one token alone, none at all, infinite and broken ones."""
    generator = torch.Generator().manual_seed(seed)
    logits_MV = (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)
    logits_MV[1] = 0.25
    logits_MV[2] = float("-inf")
    logits_MV[2, vocabulary - 1] = 1.0
    logits_MV[3] = float("-inf")
    logits_MV[4, 5] = float("inf")
    logits_MV[5, vocabulary // 2] = float("nan")
    return logits_MV


def check_draws(draw: Any, vocabulary: int, dtype: torch.dtype, device: str, rows: int = 12) -> None:
    """`draw` against the law: greedy rows beside drawn ones, seeds and positions of all sizes."""
    from lowlat.layers.drawing import draw as law

    generator = torch.Generator().manual_seed(rows)
    logits_MV = drawn_logits(rows, vocabulary, dtype, seed=vocabulary)
    temperature_T = torch.tensor([0.0, 0.8, 1.7, 1e-6, 0.05])
    seed_T = torch.randint(-(1 << 63), (1 << 63) - 1, (5,), generator=generator)
    slots_M = torch.randint(0, 5, (rows,), generator=generator)
    positions_M = torch.randint(0, 1 << 20, (rows,), generator=generator)
    given = [part.to(device) for part in (logits_MV, slots_M, positions_M)]
    drawn = 0
    ids_V = torch.randperm(vocabulary + 50, generator=generator)[:vocabulary]
    for settings, more in ((None, ()), ((temperature_T, seed_T), ()), ((temperature_T, seed_T), (ids_V, 1.25))):
        expected = law(logits_MV, slots_M, positions_M, settings, *more)
        moved = None if settings is None else tuple(part.to(device) for part in settings)
        got = draw(*given, moved, *(part.to(device) if isinstance(part, torch.Tensor) else part for part in more))
        assert got.dtype == torch.int64
        assert got.tolist() == expected.tolist()
        assert (expected < 0).tolist()[:6] == [False, False, False, True, True, True]
        drawn += len(set(expected.tolist()))
    assert drawn > 8


def check_walks(walk: Any, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    """Columns one after the other against plain PyTorch; logits are far apart, so that no rounding decides."""
    from lowlat.layers.drawing import walk as law

    generator = torch.Generator().manual_seed(vocabulary)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    logits_GBV = (random(4, 3, vocabulary) * 40).to(dtype)
    logits_GBV[2, 1, 7] = float("nan")
    embed_XE, head_VE = (random(vocabulary + 1, 24) * 3).to(dtype), (random(vocabulary, 24) * 3).to(dtype)
    first_B, slots_B = torch.tensor([5, vocabulary, 0]), torch.tensor([2, 0, 1])
    positions_GB = torch.arange(12).view(4, 3)
    settings = (torch.tensor([0.0, 0.7, 1.5]), torch.tensor([3, 4, 5]))
    ids_V = torch.randperm(vocabulary + 9, generator=generator)[:vocabulary]
    given = (logits_GBV, first_B, embed_XE, head_VE, slots_B, positions_GB)
    for more in ((None, None, 1.0), (settings, None, 1.0), (settings, ids_V, 1.25)):
        expected = law(*given, *more)
        moved = tuple(None if part is None else tuple(x.to(device) for x in part) for part in more[:1])
        ids = None if more[1] is None else more[1].to(device)
        got = walk(*(part.to(device) for part in given), *moved, ids, more[2])
        assert got.tolist() == expected.tolist()
        assert expected.shape == (3, 4)
        assert expected[1, 2] == 0, "a broken row"
        assert len(set(expected.flatten().tolist())) > 8


def slot_tables(device: str) -> SlotTables:
    """Five slots and one for padding: a request at its end, one near it, one that declines guesses."""

    def table(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    pages = torch.arange(36, dtype=torch.int32, device=device).flip(0).reshape(6, 6).contiguous()
    pages[5] = 40
    return SlotTables(
        table(11, 12, 13, 14, 15, 16),
        table(9, 20, 4, 22, 7, 0),
        table(40, 23, NO_END, 23, 40, NO_END),
        table(5, 5, 5, 5, 1, 0),
        pages,
        4,
        40,
    )


def check_verification(ops: Any, plain: Any, width: int, device: str, *, counts: bool, forced: bool) -> None:
    """Rows and what counts of them: the same rows, results, slots and tokens of slots as `plain` operations give."""
    generator = torch.Generator().manual_seed(width)
    order = [3, 0, 5, 1, 4, 2, 5, 5]
    guesses_BG = torch.randint(0, 3, (8, width - 1), generator=generator)
    counts_B = torch.randint(0, width, (8,), generator=generator) if counts else None
    chosen_R = torch.randint(-1, 3, (8 * width,), generator=generator)
    chosen_R.view(8, width)[:, : width - 1] = torch.where(
        torch.rand(8, width - 1, generator=generator) < 0.75, guesses_BG, chosen_R.view(8, width)[:, : width - 1]
    )
    forced_B = torch.randint(1, width + 1, (8,), generator=generator) if forced else None
    found = []
    for chosen_ops, where in ((plain, "cpu"), (ops, device)):
        tables = slot_tables(where)
        tables.history_TL = torch.full((6, 60), -9, dtype=torch.int32, device=where)
        slots_B, guessed, count, chosen, force = (
            part if part is None else part.to(where)
            for part in (torch.tensor(order), guesses_BG, counts_B, chosen_R, forced_B)
        )
        rows = chosen_ops.begin_rows(slots_B, tables, guessed, count)
        result = chosen_ops.accept(chosen, rows, slots_B, tables, guessed, force)
        parts = [getattr(rows, name).tolist() for name in rows.__struct_fields__]
        history = tables.history_TL.tolist()
        found.append([*parts, history, result.tolist(), tables.tokens_T.tolist(), tables.lengths_T.tolist()])
    assert found[0] == found[1]
    counted = [row[0] for row in found[0][-3]]
    assert found[0][-4][0][9] == 11, "the newest token stands at its position"
    assert set(found[0][-4][5]) == {-9}, "padding"
    assert counted[2] == counted[6] == counted[7] == 0, "padding"
    if width > 3 and not forced:
        assert max(counted) > 1
    assert found[0][-1][-1] == 0


def check_finds(find_again: Any, count: int, device: str) -> None:
    """What followed the longest run before, as the host's n-grams have it; few different tokens, so runs are many."""
    from lowlat.speculative.ngram import NgramHistory

    generator = torch.Generator().manual_seed(count)
    lengths = [0, 1, 2, 7, 40, 1023, 1024, 1500]
    tables = slot_tables(device)
    slots = len(lengths)
    history_TL = torch.randint(0, 3, (slots, 1540), generator=generator, dtype=torch.int32)
    history_TL[2, :3], history_TL[7, 800:] = torch.tensor([1, 2, 3]), torch.arange(740) % 5
    tokens = [history_TL[slot, : length + 1].tolist() for slot, length in enumerate(lengths)]
    for slot, length in enumerate(lengths):
        history_TL[slot, length:] = -9  # the newest token is not among them yet
    tables.history_TL = history_TL.to(device)
    tables.tokens_T = torch.tensor([of[-1] for of in tokens], device=device)
    tables.lengths_T = torch.tensor(lengths, device=device)
    order = [5, 0, 3, 7, 2, 6, 1, 4, 4]
    guesses, counts = find_again(torch.tensor(order, device=device), tables, count)
    assert guesses.shape == (len(order), count)
    found = 0
    for slot, row, known in zip(order, guesses.tolist(), counts.tolist(), strict=True):
        history = NgramHistory()
        history.observe(tokens[slot])
        expected = history.propose(count).tokens
        assert known == len(expected)
        assert row[:known] == expected
        found += known > 0
    assert 5 <= found < len(order)
    others = torch.randint(100, 200, (len(order), count), generator=generator).to(device)
    guesses, counts = find_again(torch.tensor(order, device=device), tables, count, 4, others)
    assert counts.tolist() == [count] * len(order)
    kept = 0
    for slot, row, other in zip(order, guesses.tolist(), others.tolist(), strict=True):
        history = NgramHistory(shortest=4)
        history.observe(tokens[slot])
        assert row == (history.propose(count).tokens or other)
        kept += row == other
    assert 0 < kept < len(order)


def block_case(
    lengths: list[int], block: int, device: str, dtype: torch.dtype, *, window: int = 0, **shape: Any
) -> tuple[PagedCase, DeviceStep, AttentionRule]:
    """Blocks of a draft behind contexts of `lengths` tokens; their own keys lie behind the pages."""
    case = PagedCase(lengths, [0] * len(lengths), dtype=dtype, window=0, **shape)
    base = len(case.keys_SKD)
    generator = torch.Generator().manual_seed(block)
    rows = len(lengths) * block
    heads, kv_heads, dim = shape["heads"], shape["kv_heads"], shape["dim"]
    case.q_RND = torch.randn(rows, heads, dim, generator=generator).to(dtype).to(device)
    more = [torch.randn(rows, kv_heads, dim, generator=generator).to(dtype) for _ in range(2)]
    case.keys_SKD, case.values_SKD = (
        torch.cat([pool, own]).to(device) for pool, own in zip((case.keys_SKD, case.values_SKD), more, strict=True)
    )
    case.table_TP = case.table_TP.to(device)
    real = torch.tensor([block if length else 0 for length in lengths], dtype=torch.int32)
    batch = case.segments
    batch.slots_B = batch.slots_B.to(device)
    batch.first_B = (torch.arange(len(lengths), dtype=torch.int32) * block).to(device)
    batch.rows_B = real.to(device)
    batch.lengths_B = (torch.tensor(lengths, dtype=torch.int32) + real).to(device)
    batch.most_rows, batch.longest, batch.tight = block, max(lengths) + block, True
    step = case.step
    step.block_base = base
    return case, step, AttentionRule(window=window)


def blocks_by_hand(case: PagedCase, step: DeviceStep, rule: AttentionRule) -> torch.Tensor:
    """Attention of blocks in float64, from the definition; rows of padding are zeros."""
    batch = case.segments
    out = torch.zeros(case.q_RND.shape, dtype=torch.float64)
    keys, values, queries = (part.double().cpu() for part in (case.keys_SKD, case.values_SKD, case.q_RND))
    group = queries.shape[1] // keys.shape[1]
    parts = (batch.slots_B, batch.first_B, batch.rows_B, batch.lengths_B)
    for slot, first, rows, length in zip(*(part.tolist() for part in parts), strict=True):
        before = length - rows
        token = torch.arange(max(0, before - rule.window) if rule.window else 0, before)
        place = case.table_TP[slot].cpu()[token // case.page_size].long() * case.page_size + token % case.page_size
        place = torch.cat([place, step.block_base + first + torch.arange(rows)])
        for row in range(first, first + rows):
            for head in range(queries.shape[1]):
                weights = (keys[place, head // group] @ queries[row, head] * queries.shape[2] ** -0.5).softmax(0)
                out[row, head] = weights @ values[place, head // group]
    return out
