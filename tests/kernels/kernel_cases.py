"""Random inputs for the kernels of the general path, on poisoned memory and scattered pages, on any device."""

from __future__ import annotations

import torch

from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DeviceStep, ItemSegments, RowSegments

DeviceLike = torch.device | str


class PagedCase:
    """Segments of requests over pages in random order; slots that nobody may read hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        rows: list[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = "cpu",
        window: int = 0,
        seed: int = 0,
        items: list[list[int]] | None = None,
    ) -> None:
        """`items`: of each segment, the lengths of the items at its end; where they have more tokens than the segment
        has rows, the first item began that much earlier."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        count = len(lengths)
        pages_each = [-(-length // page_size) for length in lengths]
        total = sum(pages_each) + 3
        order = torch.randperm(total, generator=generator).to(torch.int32)
        # Entries beyond a request's pages name a page that holds NaN, and so do those that a window has passed.
        poisoned = int(order[-1])
        table = torch.full((count + 2, max([*pages_each, 1]) + 3), poisoned, dtype=torch.int32)
        slots = torch.randperm(count + 2, generator=generator)[:count]
        keys, values = (torch.full((total * page_size, kv_heads, dim), float("nan"), dtype=dtype) for _ in range(2))
        first = 0
        seen = [item_segments(*one) for one in zip(lengths, rows, items or [[]] * count, strict=True)]
        for slot, length, pages, new, (prefix, _) in zip(slots.tolist(), lengths, pages_each, rows, seen, strict=True):
            table[slot, :pages] = order[first : first + pages]
            first += pages
            seen_from = max(0, min(prefix, length - new) - window + 1) if window else 0
            token = torch.arange(seen_from, length)
            place = table[slot][token // page_size].long() * page_size + token % page_size
            keys[place], values[place] = random(len(token), kv_heads, dim), random(len(token), kv_heads, dim)
            table[slot, : seen_from // page_size] = poisoned
        self.q_RND = random(sum(rows), heads, dim).to(device)
        self.keys_SKD, self.values_SKD = keys.to(device), values.to(device)
        starts = torch.tensor([0, *rows]).cumsum(0)[:-1]
        self.table_TP = table.to(device)
        self.page_size = page_size
        self.segments = RowSegments(
            *(part.to(device=device, dtype=torch.int32) for part in (slots, starts, torch.tensor(rows))),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            most_rows=max(rows),
            longest=max(lengths),
        )
        if items is not None:
            begins = [begin for _, begins in seen for begin in begins]
            self.segments.items = ItemSegments(
                *(
                    torch.tensor(part, dtype=torch.int32, device=device)
                    for part in ([prefix for prefix, _ in seen], begins)
                )
            )
        self.sinks_N = random(heads).to(device)

    @property
    def step(self) -> DeviceStep:
        """What attention needs of a step."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return DeviceStep(nothing, nothing, nothing, [self.segments], self.table_TP, self.page_size, None)

    def rule(self, *, window: int = 0, sinks: bool = False, scale: float | None = None) -> AttentionRule:
        return AttentionRule(scale=scale, window=window, sinks_N=self.sinks_N if sinks else None)


def item_segments(length: int, rows: int, items: list[int]) -> tuple[int, list[int]]:
    """The places before a segment's items, and where each row's own begins; the whole segment where it has none."""
    start = length - rows
    if not items:
        return length, [length] * rows
    done = max(0, sum(items) - rows)
    prefix = length - sum(items)
    plain = rows - sum(items) if not done else 0
    begins = [prefix if done else start] * plain
    place = prefix
    for item in items:
        begins += [place] * item
        place += item
    return prefix, begins[done:] if done else begins


def by_hand(case: PagedCase, rule: AttentionRule) -> torch.Tensor:
    """Attention in float64, row by row, from the definition."""
    batch = case.segments
    heads, kv_heads, dim = case.q_RND.shape[1], case.keys_SKD.shape[1], case.q_RND.shape[2]
    scale = dim**-0.5 if rule.scale is None else rule.scale
    out = torch.zeros(case.q_RND.shape, dtype=torch.float64, device=case.q_RND.device)
    parts = (part.tolist() for part in (batch.slots_B, batch.first_B, batch.rows_B, batch.lengths_B))
    for index, (slot, first, rows, length) in enumerate(zip(*parts, strict=True)):
        for row in range(rows):
            position = length - rows + row
            if position < 0:
                continue
            token = torch.arange(position + 1)
            distance = position - token
            if batch.items is not None:
                prefix, begin = int(batch.items.prefix_B[index]), int(batch.items.begins_R[first + row])
                token = token[(token < prefix) | (token >= begin)]
                distance = torch.where(token < prefix, prefix + position - begin - token, position - token)
            if rule.window:
                token = token[distance < rule.window]
            place = case.table_TP[slot].cpu()[token // case.page_size].long() * case.page_size
            place = (place + token % case.page_size).to(case.q_RND.device)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = case.keys_SKD[place, kv_head].double() @ case.q_RND[first + row, head].double() * scale
                if rule.sinks_N is not None:
                    scores = torch.cat([scores, rule.sinks_N[head].double()[None]])
                weights = scores.softmax(0)[: len(token)]
                out[first + row, head] = weights @ case.values_SKD[place, kv_head].double()
    return out
