// Down: activations of other blocks become rows of the matrix instructions, a warp has tiles of its own.
#pragma once
#include "experts_ring.cuh"

// The activations of the experts of this block's outputs, as rows of matrix instructions. They come from other blocks.
DEV void take_activations(const Params& p, Shared& s, int first_slot, int slots, int warp, int lane, u32 epoch) {
  constexpr int EACH = (2 * GROUPS + WARPS - 1) / WARPS;
  const int row = lane / 4;
  uint4 got[EACH][4], x[EACH];
  u32 powers[EACH], polls = 0, unit0 = 0, unit1 = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const bool wanted = i * WARPS + warp < slots * GROUPS && row < p.rows;
      got[i][j] = make_uint4(0, wanted ? ~epoch : epoch, 0, epoch);
    }
  bool missing = true;
  while (missing && polls <= p.spin_limit) {  // all that have not come are asked for at once
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int u = i * WARPS + warp;
      const u8* at = p.inner + (((long long)(first_slot + u / GROUPS) * MAX_ROWS + row) * INNER + u % GROUPS * GROUP +
                                lane % 4 * 8) * 8;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (got[i][j].y != epoch || got[i][j].w != epoch) got[i][j] = load_exchange(at + j * 16);
    }
    missing = false;
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) missing |= got[i][j].y != epoch || got[i][j].w != epoch;
    if (++polls > p.spin_limit) *p.error = 3;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; j++) v[2 * j] = __uint_as_float(got[i][j].x), v[2 * j + 1] = __uint_as_float(got[i][j].z);
    powers[i] = group_power(group_largest(v));
    x[i] = rounded_half(v, powers[i]);
    const int u = i * WARPS + warp;
    if (u < GROUPS) unit0 = max(unit0, powers[i]);
    if (u >= GROUPS && u < slots * GROUPS) unit1 = max(unit1, powers[i]);
  }
  if (lane % 4 == 0) s.most[0][warp][row] = unit0, s.most[1][warp][row] = unit1;
  named_sync(2, THREADS);  // partial sums are no longer read, too: rows take their place
#pragma unroll
  for (int w = lane % 4; w < WARPS; w += 4) unit0 = max(unit0, s.most[0][w][row]), unit1 = max(unit1, s.most[1][w][row]);
#pragma unroll
  for (int o = 1; o < 4; o *= 2)
    unit0 = max(unit0, __shfl_xor_sync(~0u, unit0, o)), unit1 = max(unit1, __shfl_xor_sync(~0u, unit1, o));
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int u = i * WARPS + warp;
    if (u < slots * GROUPS) s.rows[u / GROUPS][u % GROUPS][lane] = in_units(x[i], powers[i], u < GROUPS ? unit0 : unit1);
  }
  if (warp == 0 && lane % 4 == 0) s.units[0][row] = power_value(unit0), s.units[1][row] = power_value(unit1);
  named_sync(1, 32 * WARPS);
}
// Where the outputs of an expert go for rows 2q and 2q + 1: row * TOP + place among the row's experts, or -1.
DEV void find_places(const Params& p, const Choice& c, int expert, int lane, int (&place)[2]) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = lane % 4 * 2 + i;
    place[i] = -1;
    if (row < p.rows)
      for (int k = 0; k < TOP; k++)
        if (c.chosen[row][k] == expert) place[i] = row * TOP + k;
  }
}
DEV void multiply_second(const Params& p, Shared& s, const Work& work, int first_slot, int warp, int lane) {
  const int before = work.firsts * PARTS_PAGES;
  u32 tile = 0, rows = 0, scales[DEPTH];
  uint4 w[DEPTH], x[DEPTH][2];
  auto go_to = [&](int n) {  // the tile that is loaded from now on
    const int place = n % PLACES;
    rows = shared_address(s.rows[(work.second + n) / SECOND_TILES - first_slot]) + lane * 16;
    tile = page_address(before + n / PAGE_TILES) + place % PAGE_TILES * SECOND_TILE;
    wait_for(p, &s.tiles[place], n / PLACES & 1, 2);
  };
  auto load = [&](int pair, int i) {
    scales[i] = load_shared_word(tile + SECOND_PAIRS * PAIR_BYTES + pair * PAIR_SCALES + lane / 4 * 4);
    w[i] = load_shared(tile + pair * PAIR_BYTES + lane * 16);
    x[i][0] = load_shared(rows + pair * 1024);
    x[i][1] = load_shared(rows + pair * 1024 + 512);
  };
  bool more = work.second + warp < work.second_end;
  if (more) go_to(warp);
  for (int i = 0; more && i < DEPTH; i++) load(i, i);
  int slot = -1, goes[2] = {-1, -1};
#pragma unroll 1
  for (int n = warp; more; n += WARPS) {
    const int item = work.second + n;
    if (item / SECOND_TILES != slot) {
      slot = item / SECOND_TILES;
      find_places(p, s.choice, s.choice.experts[slot], lane, goes);
    }
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int pair = 0; pair < SECOND_PAIRS; pair++) {
      const int i = pair % DEPTH;
      add_pair(sum, w[i], scales[i], x[i][0], x[i][1]);
      if (pair + DEPTH == SECOND_PAIRS) {  // all of the tile has been read
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&s.empty[n % PLACES]));
        more = item + WARPS < work.second_end;
        if (more) go_to(n + WARPS);
      }
      if (pair + DEPTH < SECOND_PAIRS || more) load((pair + DEPTH) % SECOND_PAIRS, i);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (goes[i] >= 0) {
        float* to = p.parts + (long long)goes[i] * HIDDEN + item % SECOND_TILES * 16 + lane / 4;
        const float unit = FP4_TO_HALF * s.units[slot - first_slot][lane % 4 * 2 + i];
        to[0] = sum[i] * unit;
        to[8] = sum[i + 2] * unit;
      }
  }
}

// One warp, a lane a place: fills it again when its tile has been read.
DEV void refill_second(const Params& p, Shared& s, const Work& work, int lane, u64 policy) {
  int n = lane + PLACES, polls = 0;
  while (lane < PLACES && work.second + n < work.second_end) {
    if (barrier_test(shared_address(&s.empty[lane]), n / PLACES - 1 & 1)) {
      copy_second(p, s, work, n, policy);
      n += PLACES, polls = 0;
    } else if (++polls > p.spin_limit) {
      *p.error = 2;
      return;
    } else {
      __nanosleep(32);
    }
  }
}
