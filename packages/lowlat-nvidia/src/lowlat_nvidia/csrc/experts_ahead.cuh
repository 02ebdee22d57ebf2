// With ROWS_AHEAD: warps of their own make rows of down of activations as experts are done, while gate and up go on. Where
// those end, down goes on at once: nobody asks, quantises or meets in between.
#pragma once
#include "experts_ring.cuh"

#if ROWS_AHEAD
constexpr int AT_ONCE = 2;  // groups that a preparer asks for together
static_assert(GROUPS % AT_ONCE == 0, "whole steps");

// Until this block is a tile beyond the last of an expert: others are about as far, so that asking earlier would be in vain.
// No more than a hint.
DEV void wait_for_tiles(const Params& p, Shared& s, int slot, const Work& work) {
  const int last = min(((slot + 1) * FIRST_TILES - 1) / (int)gridDim.x + 1, work.firsts - 1);
  if (last < 0) return;
  for (u32 polls = 0; *(volatile int*)&s.finished[last % FINISHERS] < last && polls < p.spin_limit; polls++) __nanosleep(100);
}
// AT_ONCE groups of an expert's activations as rows, in units of their own scales. The greatest scale of row lane / 4.
DEV u32 take_groups(const Params& p, Shared& s, int first_slot, int slot, int group, int lane, u32 epoch) {
  const int row = lane / 4;
  const u8* at = p.inner + (((long long)(first_slot + slot) * MAX_ROWS + row) * INNER + group * GROUP + lane % 4 * 8) * 8;
  uint4 got[AT_ONCE][4];
  u32 polls = 0, most = 0;
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) got[i][j] = make_uint4(0, row < p.rows ? ~epoch : epoch, 0, epoch);
  bool missing = row < p.rows;
  while (missing && polls <= p.spin_limit) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (got[i][j].y != epoch || got[i][j].w != epoch) got[i][j] = load_exchange(at + i * GROUP * 8 + j * 16);
    missing = false;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) missing |= got[i][j].y != epoch || got[i][j].w != epoch;
    if (++polls > p.spin_limit) *p.error = 3;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; j++) v[2 * j] = __uint_as_float(got[i][j].x), v[2 * j + 1] = __uint_as_float(got[i][j].z);
    const u32 power = group_power(group_largest(v));
    s.rows[slot][group + i][lane] = rounded_half(v, power);
    if (lane % 4 == 0) s.powers[slot * GROUPS + group + i][row] = power;
    most = max(most, power);
  }
  return most;
}
// The preparers take turns, AT_ONCE groups each; when all have theirs, each brings its own to the row's unit.
DEV void prepare_rows(const Params& p, Shared& s, const Work& work, int first_slot, int slots, int turn, int lane, u32 epoch) {
  const int row = lane / 4;
#pragma unroll 1
  for (int slot = 0; slot < slots; slot++) {
    wait_for_tiles(p, s, first_slot + slot, work);
    u32 unit = 0;
#pragma unroll 1
    for (int group = turn * AT_ONCE; group < GROUPS; group += PREPARERS * AT_ONCE)
      unit = max(unit, take_groups(p, s, first_slot, slot, group, lane, epoch));
    if (lane % 4 == 0) s.most[slot][turn][row] = unit;
    named_sync(1, 32 * PREPARERS);
#pragma unroll
    for (int w = 0; w < PREPARERS; w++) unit = max(unit, s.most[slot][w][row]);
#pragma unroll 1
    for (int group = turn * AT_ONCE; group < GROUPS; group += PREPARERS * AT_ONCE)
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        uint4& x = s.rows[slot][group + i][lane];
        x = in_units(x, s.powers[slot * GROUPS + group + i][row], unit);
      }
    if (turn == 0 && lane % 4 == 0) s.units[slot][row] = power_value(unit);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.ready[slot]));
  }
}
// The first tile of down of this block that no warp has begun; those that multiply from the start have one each.
DEV int claim_tile(Shared& s, int lane) {
  int n = 0;
  if (lane == 0) n = WARPS + atomicAdd(&s.claimed, 1);
  return __shfl_sync(~0u, n, 0);
}
#else
DEV int claim_tile(Shared&, int) { return 0; }
#endif
