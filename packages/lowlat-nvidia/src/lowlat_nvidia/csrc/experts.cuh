// Pieces shared by the kernels of routed experts: choosing experts, FP4 weights in matrix instructions, FP8 activations.
//
// Up to 8 rows are the 8 columns of the matrix instructions: every touched expert multiplies all of them, and a row
// reads what its own experts gave. So rows are not sorted or moved; an expert needs no more than a mask of its rows.
#pragma once
#include "ptx.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, MAX_ROWS = 8, GROUP = 32;
constexpr int PAIR_BYTES = 512, PAIR_SCALES = 32;  // two groups of 16 output rows: 8 bytes a lane and group
constexpr int PAIR_ALL = PAIR_BYTES + PAIR_SCALES;
constexpr float FP4_TO_FP8 = 64.f;  // what an e2m1 is worth over the e4m3 with the same bits
static_assert(EXPERTS % 32 == 0, "experts are chosen by warps");

struct Params {
  const u8* hidden;        // [rows][HIDDEN] bfloat16
  const u8* gate;          // [EXPERTS][HIDDEN] bfloat16
  const float* bias;       // [EXPERTS]
  const u8* first;         // packed gate and up of all experts
  const u8* second;        // packed down of all experts
  float* logits;           // [rows][EXPERTS]
  u8* quantised;           // [MAX_ROWS][HIDDEN] e4m3
  float* scales;           // [HIDDEN / GROUP][MAX_ROWS]
  float* inner;            // [slot][MAX_ROWS][INNER]
  float* parts;            // [rows][TOP][HIDDEN]
  int* chosen;             // [rows][TOP]
  float* weights;          // [rows][TOP]
  float* out;              // [rows][HIDDEN]
  const int* listed;       // experts given from outside: [0] how many, then their numbers; or null
  u32* error;              // 0 while all is well
  int rows;
  float scaling;
  u32 spin_limit;
};

// Of the experts that any row chose: their numbers in ascending order; and what each row chose, best first.
struct Choice {
  int count;
  u32 masks[EXPERTS];
  int experts[MAX_ROWS * TOP];
  int chosen[MAX_ROWS][TOP];
  float weights[MAX_ROWS][TOP];
};

DEV void wait_for_earlier_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

DEV u32 order_key(float x) {  // larger floats give larger keys
  const u32 bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp a row: TOP best of score + bias, ties by the lowest number; weights from the scores without the bias.
DEV void choose_row(const Params& p, Choice& c, int row, int lane) {
  constexpr int EACH = EXPERTS / 32;
  float score[EACH];
  u32 key[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float x = p.logits[row * EXPERTS + i * 32 + lane];
    score[i] = sqrtf(x > 20.f ? x : log1pf(expf(x)));
    key[i] = order_key(score[i] + p.bias[i * 32 + lane]);
  }
  float total = 0;
#pragma unroll 1
  for (int k = 0; k < TOP; k++) {
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) mine = max(mine, key[i]);
    const u32 best = __reduce_max_sync(~0u, mine);
    u32 number = ~0u;
    float value = 0;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--)
      if (key[i] == best) number = i * 32 + lane;
    const u32 winner = __reduce_min_sync(~0u, number);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == winner) value = score[i], key[i] = 0;
    value = __shfl_sync(~0u, value, winner % 32);
    total += value;
    if (lane == 0) {
      c.chosen[row][k] = winner;
      c.weights[row][k] = value;
      atomicOr(&c.masks[winner], 1u << row);
    }
  }
  __syncwarp();
  if (lane < TOP) c.weights[row][lane] = c.weights[row][lane] / (total + 1e-20f) * p.scaling;
}
// All threads. Every block chooses for itself: it costs less than waiting for one that does.
DEV void choose(const Params& p, Choice& c) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  for (int e = thread; e < EXPERTS; e += THREADS) c.masks[e] = 0;
  __syncthreads();
  if (p.listed) {
    if (thread == 0) c.count = p.listed[0];
    if (thread < MAX_ROWS * TOP) c.experts[thread] = p.listed[1 + thread];
    if (warp < p.rows && lane < TOP) {
      c.chosen[warp][lane] = p.chosen[warp * TOP + lane];
      atomicOr(&c.masks[c.chosen[warp][lane]], 1u << warp);
    }
    __syncthreads();
    return;
  }
  if (warp < p.rows) choose_row(p, c, warp, lane);
  __syncthreads();
  if (warp == 0) {
    int count = 0;
    for (int e = lane; e < EXPERTS; e += 32) {
      const bool touched = c.masks[e] != 0;
      const u32 which = __ballot_sync(~0u, touched);
      if (touched) c.experts[count + __popc(which & ((1u << lane) - 1))] = e;
      count += __popc(which);
    }
    if (lane == 0) c.count = count;
  }
  __syncthreads();
}

// The scale of a group by its largest magnitude: a power of two, so that the group fits e4m3.
DEV float group_scale(float largest) {
  const u32 bits = __float_as_uint(__fdiv_rn(fmaxf(largest, 1e-10f), 448.f));
  return __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
}
DEV u32 to_fp8(float a, float b, float c, float d) {  // four e4m3, the first in the lowest byte
  unsigned short low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return (u32)high << 16 | low;
}
// Four e2m1 of the high and of the low halves of the bytes of `w`, as e4m3 of 1/64 of their values.
DEV u32 high_fp8(u32 w) { return (w & 0x80808080u) | ((w >> 2) & 0x1c1c1c1cu); }
DEV u32 low_fp8(u32 w) { return ((w << 4) & 0x80808080u) | ((w << 2) & 0x1c1c1c1cu); }

// d = A b, A 16 outputs x 32 inputs, b 32 inputs x 8 rows. Lane (g, q): a[0], a[1] of output g, a[2], a[3] of output
// g + 8, b of row g, all for inputs 8q .. 8q + 7; d[0], d[1] of output g and rows 2q, 2q + 1; d[2], d[3] of g + 8.
DEV void mma_fp8(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a2), "r"(a1), "r"(a3), "r"(b.x), "r"(b.y), "f"(0.f));
}
// One group: weights of output g in w.x, of g + 8 in w.y; their two scales; the scales of rows 2q, 2q + 1.
DEV void add_group(float (&sum)[4], uint2 w, u32 scale_g, u32 scale_g8, uint2 b, float2 rows) {
  float d[4];
  mma_fp8(d, low_fp8(w.x), high_fp8(w.x), low_fp8(w.y), high_fp8(w.y), b);
  const float s0 = __uint_as_float(scale_g << 23), s1 = __uint_as_float(scale_g8 << 23);
  sum[0] += d[0] * (s0 * rows.x);
  sum[1] += d[1] * (s0 * rows.y);
  sum[2] += d[2] * (s1 * rows.x);
  sum[3] += d[3] * (s1 * rows.y);
}

// A warp's own ring of chunks, filled ahead by bulk copies. `next` maps a chunk's number to its address.
template <int CHUNK_PAIRS, int DEPTH>
struct Ring {
  static constexpr int BYTES = CHUNK_PAIRS * PAIR_ALL;
  u32 pages, barriers;
  int total, taken;
  u64 policy;

  template <class Next>
  DEV void start(u32 pages_at, u32 barriers_at, int chunks, int lane, Next next) {
    pages = pages_at, barriers = barriers_at, total = chunks, taken = 0;
    policy = read_once_policy();
    if (lane == 0)
      for (int i = 0; i < DEPTH && i < total; i++) fill(i, next);
  }
  template <class Next>
  DEV void fill(int chunk, Next next) {
    const int page = chunk % DEPTH;
    barrier_expect(barriers + page * 8, BYTES);
    copy_bulk(pages + page * BYTES, next(chunk), BYTES, barriers + page * 8, policy);
  }
  // Waits for the next chunk; false: it never came.
  DEV bool wait(u32 limit) {
    const u32 barrier = barriers + taken % DEPTH * 8, phase = taken / DEPTH % 2;
    u32 polls = 0;
    while (!barrier_done(barrier, phase))
      if (++polls > limit) return false;
    return true;
  }
  DEV u32 page() { return pages + taken % DEPTH * BYTES; }
  // Gives the page back. What was loaded from it has been used by a matrix instruction, so all loads have returned.
  template <class Next>
  DEV void release(int lane, Next next) {
    __syncwarp();
    if (lane == 0 && taken + DEPTH < total) fill(taken + DEPTH, next);
    taken++;
  }
};
DEV uint2 load_shared_pair(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
DEV u32 load_shared_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
// Multiplies the pairs of one chunk; group(i) gives the activations and row scales of the i-th pair's two groups.
template <int CHUNK_PAIRS, class Activation, class Scale>
DEV void multiply_chunk(float (&sum)[4], u32 page, int lane, Activation activation, Scale scale) {
  const u32 scales = page + CHUNK_PAIRS * PAIR_BYTES + lane / 4 * 4;
#pragma unroll
  for (int i = 0; i < CHUNK_PAIRS; i++) {
    const uint4 w = load_shared(page + i * PAIR_BYTES + lane * 16);
    const u32 s = load_shared_word(scales + i * PAIR_SCALES);
    add_group(sum, make_uint2(w.x, w.y), s & 255, s >> 8 & 255, activation(2 * i), scale(2 * i));
    add_group(sum, make_uint2(w.z, w.w), s >> 16 & 255, s >> 24, activation(2 * i + 1), scale(2 * i + 1));
  }
}
