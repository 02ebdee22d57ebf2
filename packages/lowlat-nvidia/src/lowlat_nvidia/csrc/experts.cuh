// Pieces shared by the kernels of routed experts: choosing experts, FP4 weights in matrix instructions, FP8 activations.
//
// Up to 8 rows are the 8 columns of the matrix instructions: every touched expert multiplies all of them, and a row
// reads what its own experts gave. So rows are not sorted or moved; an expert needs no more than a mask of its rows.
#pragma once
#include "quantised.cuh"

constexpr int WARPS = 16, FINISHERS = 4;  // warps that multiply, and those that sum, publish and fill pages
constexpr int ALL_WARPS = WARPS + FINISHERS, THREADS = 32 * ALL_WARPS;
constexpr int PAIR_BYTES = 512, PAIR_SCALES = 32;  // two groups of 16 output rows: 8 bytes a lane and group
constexpr int PAIR_ALL = PAIR_BYTES + PAIR_SCALES;
constexpr float FP4_TO_HALF = 16384.f;  // what an e2m1 is worth over the float16 with the same bits
static_assert(EXPERTS % 32 == 0, "experts are chosen by warps");

struct Params {
  const u8* hidden;        // [rows][HIDDEN] bfloat16
  const u8* gate;          // [EXPERTS][HIDDEN] bfloat16
  const float* bias;       // [EXPERTS]
  const u8* first;         // packed gate and up of all experts
  const u8* second;        // packed down of all experts
  float* logits;           // [rows][EXPERTS]
  u8* inner;               // [slot][MAX_ROWS][INNER] words of a float and the launch's tag
  float* parts;            // [rows][TOP][HIDDEN]
  int* chosen;             // [rows][TOP]
  float* weights;          // [rows][TOP]
  float* out;              // [rows][HIDDEN]
  const int* listed;       // experts given from outside: [0] how many, then their numbers; or null
  u32* error;              // 0 while all is well
  u32* epochs;             // [block]: launches so far
  int rows, phases;        // phases: 1, gate and up alone; 2, down as well
  float scaling;
  u32 spin_limit;
  u32 zero;                // 0, which the compiler does not know
};

// The launch's number. Of the experts that any row chose: their numbers in ascending order; and what each row chose, best
// first.
struct Choice {
  u32 epoch;
  int count;
  u32 masks[EXPERTS];
  int experts[MAX_ROWS * TOP];
  int chosen[MAX_ROWS][TOP];
  float weights[MAX_ROWS][TOP];
};

// A warp a row: TOP best of score + bias, ties by the lowest number; weights from the scores without the bias.
DEV void choose_row(const Params& p, Choice& c, const float2* scores, int row, int lane) {
  constexpr int EACH = EXPERTS / 32;
  float score[EACH];
  u32 key[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float2 found = scores[row * EXPERTS + i * 32 + lane];
    score[i] = found.x;
    key[i] = order_key(found.y);
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
// All threads. Every block chooses for itself: it costs less than waiting for one that does. `scores`: [rows][EXPERTS] in
// shared memory, without and with the bias.
DEV void choose(const Params& p, Choice& c, float2* scores) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const u32 last = __ldcg(p.epochs + blockIdx.x);
  for (int e = thread; e < EXPERTS; e += THREADS) c.masks[e] = 0;
  if (!p.listed) {
    constexpr int EACH = (MAX_ROWS * EXPERTS + THREADS - 1) / THREADS;
    float x[EACH], bias[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int place = i * THREADS + thread, there = place < p.rows * EXPERTS ? place : 0;
      x[i] = __ldcg(p.logits + there), bias[i] = p.bias[there % EXPERTS];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int place = i * THREADS + thread;
      if (place >= p.rows * EXPERTS) break;
      const float soft = log1pf(expf(fminf(x[i], 20.f))), score = sqrtf(x[i] > 20.f ? x[i] : soft);
      scores[place] = make_float2(score, score + bias[i]);
    }
  }
  if (thread == 0) c.epoch = last + 1;
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
  if (warp < p.rows) choose_row(p, c, scores, warp, lane);
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

// Eight e2m1 as four pairs of float16 of 2^-14 of their values. A pair's bits lie as close to their places as 16 bits
// allow: sign, exponent and mantissa of pairs 0 and 1 together, those of 2 and 3 apart, which one product by two powers of
// two brings to their places at once. Shifts and products run beside the masks, in units that have little else to do.
DEV void fp4_to_half(u32 w, u32 (&a)[4]) {
  constexpr u32 ALL = 0x8e008e00u;
  a[0] = w & ALL;
  a[1] = (w << 3) & ALL;
  a[2] = ((w & 0x40384038u) * ((1u << 6) + (1u << 1))) & ALL;
  a[3] = ((w & 0x20072007u) * ((1u << 9) + (1u << 2))) & ALL;
}
// One group of 32 inputs: weights of output g in w0, of g + 8 in w1, and their scales; b: row g, inputs 8q .. 8q + 7.
DEV void add_group(float (&sum)[4], u32 w0, u32 w1, u32 scale_g, u32 scale_g8, uint4 b) {
  u32 low[4], high[4];
  fp4_to_half(w0, low);
  fp4_to_half(w1, high);
  float d[4] = {0, 0, 0, 0};
  mma_half(d, low[0], high[0], low[1], high[1], b.x, b.y);
  mma_half(d, low[2], high[2], low[3], high[3], b.z, b.w);
  const float s0 = power_value(scale_g), s1 = power_value(scale_g8);
  sum[0] += d[0] * s0;
  sum[1] += d[1] * s0;
  sum[2] += d[2] * s1;
  sum[3] += d[3] * s1;
}
// A pair of groups, their scales of rows g and g + 8, and what they multiply.
DEV void add_pair(float (&sum)[4], uint4 w, u32 scales, uint4 x, uint4 y) {
  add_group(sum, w.x, w.y, scales & 255, scales >> 8 & 255, x);
  add_group(sum, w.z, w.w, scales >> 16 & 255, scales >> 24, y);
}
