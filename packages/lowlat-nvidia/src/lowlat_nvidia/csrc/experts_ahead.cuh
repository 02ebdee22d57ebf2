// With TAKE_AHEAD: while they wait for tiles of gate and up, finishers make rows of down of activations that have come. Down
// of all but the last experts can then go on where gate and up ends: nobody asks, quantises or meets in between.
#pragma once
#include "experts_ring.cuh"

// Of a unit, a group of a row of one of the block's experts: where its activations are published.
DEV const u8* activations_at(const Params& p, int first_slot, int unit, int row, int lane) {
  return p.inner + (((long long)(first_slot + unit / GROUPS) * MAX_ROWS + row) * INNER + unit % GROUPS * GROUP + lane % 4 * 8) * 8;
}
DEV bool all_lanes(bool x) { return __ballot_sync(~0u, x) == ~0u; }

// The units of one finisher: `next` of `count`, then every FINISHERS-th; `next` is above all when they are ready.
struct Units {
  int first_slot, next, count;
};
constexpr int READY = 1 << 20;
// The next two units, if they have come.
DEV void take_units(const Params& p, Shared& s, Units& units, int lane, u32 epoch) {
  const int row = lane / 4, other = units.next + FINISHERS < units.count ? units.next + FINISHERS : units.next;
  uint4 got[2][4];
  bool there = true;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      got[i][j] = make_uint4(0, epoch, 0, epoch);
      if (row < p.rows) got[i][j] = load_exchange(activations_at(p, units.first_slot, i ? other : units.next, row, lane) + j * 16);
    }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) there = there && got[i][j].y == epoch && got[i][j].w == epoch;
  if (!all_lanes(there)) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int unit = i ? other : units.next;
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; j++) v[2 * j] = __uint_as_float(got[i][j].x), v[2 * j + 1] = __uint_as_float(got[i][j].z);
    const u32 power = group_power(group_largest(v));
    s.rows[unit / GROUPS][unit % GROUPS][lane] = rounded_half(v, power);
    if (lane % 4 == 0) s.powers[unit][row] = power;
  }
  units.next += 2 * FINISHERS;
  __syncwarp();
  if (units.next >= units.count && lane == 0) barrier_arrive(shared_address(&s.gathered));
}
// This finisher's units, when those of all are there, in the unit of their row.
DEV void scale_units(Shared& s, Units& units, int lane) {
  const int row = lane / 4, turn = units.next % FINISHERS;
  for (int slot = 0; slot * GROUPS < units.count; slot++) {
    u32 most = 0;
    for (int group = lane % 4; group < GROUPS; group += 4) most = max(most, s.powers[slot * GROUPS + group][row]);
#pragma unroll
    for (int o = 1; o < 4; o *= 2) most = max(most, __shfl_xor_sync(~0u, most, o));
    for (int unit = turn; unit < units.count; unit += FINISHERS) {
      if (unit / GROUPS != slot) continue;
      uint4& x = s.rows[slot][unit % GROUPS][lane];
      x = in_units(x, s.powers[unit][row], most);
    }
    if (turn == 0 && lane % 4 == 0) s.units[slot][row] = power_value(most);
  }
  units.next = READY;
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&s.ready));
}
// Until tile k can be summed.
DEV void prepare_rows(const Params& p, Shared& s, Units& units, int k, int lane, u32 epoch) {
  const int last = ((units.first_slot * GROUPS + units.count) / GROUPS * FIRST_TILES - 1) / (int)gridDim.x;
  if (!units.count || k < last + 2) return;  // not all have been published, or only just now
  while (units.next < READY && !all_lanes(barrier_test(shared_address(&s.whole[k % BUFFERS]), k / BUFFERS & 1))) {
    forget(lane);  // nothing that is made of it keeps a register
    if (units.next < units.count) take_units(p, s, units, lane, epoch);
    else if (all_lanes(barrier_test(shared_address(&s.gathered), 0))) scale_units(s, units, lane);
  }
}
// There is nothing left to wait for: what is not ready the other warps do.
DEV void end_units(Shared& s, Units& units, int lane) {
  if (units.next == READY) return;
  units.next = READY;
  if (lane) return;
  s.late = 1;
  barrier_arrive(shared_address(&s.ready));
}
