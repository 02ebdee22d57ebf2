// What each row of a step is: its request, its tokens, its share of the context and the units that this takes in the ring of
// the cache. dense/rows.py reads the same on the host.
#pragma once
#include "gemv.cuh"

#if ROW_WARPS
// Whether a warp for each row keeps more than half of the warps busy, where the longest has more units than there is room for:
// else turns share units better.
DEV bool even_rows(const Control& k, int rows) {
  int most = 0;
#pragma unroll 1
  for (int row = 0; row < rows; row++) most = max(most, k.first_unit[row + 1] - k.first_unit[row]);
  return most <= ROW_ROOM || k.first_unit[rows] > WARPS / 2 * most;
}
#endif
// How many units each row has, and which rows' warps are joined together: as many as there is room for their sums.
DEV void count_units(Control& k, int rows) {
  int parts = 0;
  k.first_unit[0] = 0;
  k.joined = 0;
#pragma unroll 1
  for (int row = 0; row < rows; row++) {
    const int units = (k.end[row] - k.begin[row] + UNIT_TOKENS - 1) / UNIT_TOKENS, sums = min(units, WARPS);
    if (parts + sums > PARTS) {
      k.joined |= 1u << (row - 1);
      parts = 0;
    }
    k.first_unit[row + 1] = k.first_unit[row] + units;
    k.place[row] = parts;
    parts += sums;
  }
  k.joined |= 1u << (rows - 1);
  k.by_rows = BY_ROWS && rows > 2;  // two have more warps by turns
  k.shared_requests = false;
#if ROW_WARPS
#pragma unroll 1
  for (int row = 0; row < rows; row++) {
    k.by_rows = k.by_rows && k.first_unit[row + 1] - k.first_unit[row] <= ROW_UNITS;
    k.shared_requests = k.shared_requests || k.first[row] != row;
  }
  if (LONG_ROWS) k.by_rows = k.by_rows && even_rows(k, rows);
#endif
}
// What a step of one row knows without looking anything up, asked for at once, behind the ring's first pages.
struct OneRow { long long token, position, slot; };
DEV OneRow ask_row(const Params& p) {
  if constexpr (ONE) return {p.tokens[0], p.positions[0], p.write_slots ? p.write_slots[0] : 0};
  else return {};
}
// What does not change from layer to layer is read once, when the step begins. A row of padding computes the first real
// row again, to the same bits and the same place; where all are padding, they compute one token and write to the scratch.
DEV void read_rows(Context& c, const OneRow& one) {
  Control& k = c.s.control;
  const int split = c.block % SPLITS;
  u32 real = one.slot >= 0 ? ~0u : 0;
  if (ROWS > 1 && c.p.write_slots) {
    real = 0;
#pragma unroll 1
    for (int row = 0; row < c.rows; row++) real |= (u32)(c.p.write_slots[row] >= 0) << row;
  }
  if (c.thread < c.rows) {
    const int row = c.thread, source = ROWS == 1 || real >> row & 1 ? row : max(0, __ffs(real) - 1);
    int request = 0;
#pragma unroll 1
    for (int q = 1; q < c.p.requests; q++) request += c.p.query_start[q] <= source;
    const int first = ROWS == 1 ? 0 : c.p.query_start[request];
    const int total = real ? (int)(ROWS == 1 ? one.position : c.p.positions[source]) + 1 : 1;
    const int each = (total + SPLITS * UNIT_TOKENS - 1) / (SPLITS * UNIT_TOKENS) * UNIT_TOKENS;
    k.token[row] = (int)(ROWS == 1 ? one.token : c.p.tokens[source]);
    k.first[row] = first;
    k.begin[row] = min(total, split * each);
    k.end[row] = min(total, (split + 1) * each);
    k.cached[row] = ROWS == 1 ? total - 1 : real ? (int)c.p.positions[first] : 0;
    k.own[row] = total - 1;
    k.pages[row] = c.p.page_table + (long)(c.p.table_rows ? c.p.table_rows[request] : request) * c.p.table_stride;
    const int page = (total - 1) >> c.p.page_shift;
    k.own_slot[row] = real ? (__ldg(k.pages[row] + page) << c.p.page_shift) + total - 1 - (page << c.p.page_shift) : 0;
  }
  for (int i = c.thread; i < 2 * LAYERS; i += THREADS) k.pools[i / 2][i % 2] = (const u8*)(real ? c.p.pools[i] : c.p.scratch);
  if constexpr (ROWS == 1) {  // nothing waits for what another thread reads
    if (c.thread == 0) count_units(k, 1);
    const int d = c.thread - (THREADS - HEAD_DIM);
    if (d >= 0) k.rotary[0][d] = c.p.rotary[(long)(real ? one.position : 0) * HEAD_DIM + d];
    block_sync();
    return;
  }
  block_sync();
  if (c.thread == 0) count_units(k, c.rows);
  for (int i = c.thread; i < c.rows * HEAD_DIM; i += THREADS) {
    const int row = i / HEAD_DIM, d = i % HEAD_DIM;
    k.rotary[row][d] = c.p.rotary[(long)k.own[row] * HEAD_DIM + d];
  }
  block_sync();
}
