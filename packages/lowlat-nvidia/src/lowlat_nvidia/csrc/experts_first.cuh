// Gate and up: warps split a tile's inputs and keep their share of the rows in registers; finishers sum, apply the
// activation, publish, and fill pages that all have read.
#pragma once
#include "experts_ring.cuh"

// A warp's share of the rows, which it keeps in registers, and what its sums are worth for rows 2q and 2q + 1.
struct Rows {
  uint4 x[2 * FIRST_PAIRS];
  float even, odd;
};
DEV void fetch_rows(const Params& p, Rows& rows, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < 2 * FIRST_PAIRS; i++) {
    const long long place = (long long)(lane / 4) * HIDDEN + (warp * 2 * FIRST_PAIRS + i) * GROUP + lane % 4 * 8;
    rows.x[i] = warp < WARPS && lane / 4 < p.rows ? *(const uint4*)(p.hidden + place * 2) : make_uint4(0, 0, 0, 0);
  }
}
DEV void quantise_rows(Rows& rows, int lane) {
  const u32 unit = quantise_share<2 * FIRST_PAIRS>(rows.x, [&](int i, float(&v)[8]) { unpack_bf16(rows.x[i], v); });
  rows.even = FP4_TO_HALF * power_value(__shfl_sync(~0u, unit, lane % 4 * 8));
  rows.odd = FP4_TO_HALF * power_value(__shfl_sync(~0u, unit, lane % 4 * 8 + 4));
}
// One warp sums a tile over all warps, applies the activation and publishes. Lane: output lane / 2, four rows; outputs 8
// to 15 are ups. Both halves of the warp take two rows each of what the other has loaded.
DEV void activate(const Params& p, Shared& s, int buffer, int lane, int item, u32 epoch) {
  float v[4] = {0, 0, 0, 0}, other[4];
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float4 add = *(const float4*)(s.parts[buffer][w] + lane * 4);
    v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) other[i] = __shfl_xor_sync(~0u, v[i], 16);
  if (lane == 0) barrier_arrive(shared_address(&s.taken[buffer]));
  const bool gates = lane < 16;
  const int slot = item / FIRST_TILES, n = item % FIRST_TILES * 8 + lane % 16 / 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane % 2 * 4 + (gates ? i : 2 + i);
    const float gate = fminf(gates ? v[i] : other[2 + i], LIMIT);
    const float up = fminf(fmaxf(gates ? other[i] : v[2 + i], -LIMIT), LIMIT);
    const long long place = ((long long)slot * MAX_ROWS + row) * INNER + n;
    if (row < p.rows) store_exchange(p.inner + place * 8, __float_as_uint(gate / (1.f + expf(-gate)) * up), epoch);
  }
}
DEV void multiply_first(const Params& p, Shared& s, const Rows& rows, const Work& work, int warp, int lane) {
  constexpr int NEXT = FIRST_PAIRS > 2 ? FIRST_PAIRS - 3 : 0;  // after this pair the next tile is waited for and loaded
  uint4 w[FIRST_PAIRS];
  u32 scales[FIRST_PAIRS], part = 0;
  auto go_to = [&](int k) {  // the tile that is loaded from now on
    const int number = k * PARTS_PAGES + warp / PAGE_PARTS;
    wait_for(p, &s.full[number % PAGES], number / PAGES & 1, 1);
    part = page_address(number) + warp % PAGE_PARTS * FIRST_PART;
  };
  auto load = [&](int i) {
    scales[i] = load_shared_word(part + FIRST_PAIRS * PAIR_BYTES + i * PAIR_SCALES + lane / 4 * 4);
    w[i] = load_shared(part + i * PAIR_BYTES + lane * 16);
  };
  if (work.firsts) go_to(0);
#pragma unroll
  for (int i = 0; i < FIRST_PAIRS; i++)
    if (work.firsts) load(i);
#pragma unroll 1
  for (int k = 0; k < work.firsts; k++) {
    const int buffer = k % BUFFERS;
    const bool more = k + 1 < work.firsts;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < FIRST_PAIRS; i++) {
      add_pair(sum, w[i], scales[i], rows.x[2 * i], rows.x[2 * i + 1]);
      if (i == NEXT && more) go_to(k + 1);
      if (i == NEXT && more)
        for (int j = 0; j < NEXT; j++) load(j);
      if (i >= NEXT && more) load(i);
    }
    if (k >= BUFFERS) wait_for(p, &s.taken[buffer], (k / BUFFERS - 1) & 1, 4);
    float* to = s.parts[buffer][warp] + lane / 4 * MAX_ROWS + lane % 4 * 2;
    *(float2*)to = make_float2(sum[0] * rows.even, sum[1] * rows.odd);
    *(float2*)(to + 8 * MAX_ROWS) = make_float2(sum[2] * rows.even, sum[3] * rows.odd);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.whole[buffer]));
  }
}
// The finishers take turns.
DEV void finish_first(const Params& p, Shared& s, const Work& work, int turn, int lane, u64 policy, u32 epoch) {
  // The second half of the ring: asked for when the first comes, or all would come late together. By the warp that will
  // fill the first half again, which cannot be late for it so.
  for (int page = 0; turn == 0 && page < PAGES / 2; page++) {
    if (page < work.firsts * PARTS_PAGES) wait_for(p, &s.full[page], 0, 1);
    if (lane < PAGE_TILES) fill_page(p, s, work, PAGES / 2 + page, lane, policy);
    __syncwarp();
  }
#pragma unroll 1
  for (int k = turn; k < work.firsts; k += FINISHERS) {
    wait_for(p, &s.whole[k % BUFFERS], k / BUFFERS & 1, 4);
    for (int tile = k ? k + 1 : 0; tile <= k + 1 && tile < work.firsts; tile++)  // all warps have read the next one, too
      if (lane < PARTS_PAGES * PAGE_TILES)
        fill_page(p, s, work, tile * PARTS_PAGES + PAGES + lane / PAGE_TILES, lane % PAGE_TILES, policy);
    __syncwarp();
    activate(p, s, k % BUFFERS, lane, first_item(k), epoch);
  }
}
