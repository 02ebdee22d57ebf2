// Pieces shared by the kernels of routed experts: choosing experts, FP4 weights in matrix instructions, FP8 activations.
//
// Up to 8 rows are the 8 columns of the matrix instructions: every touched expert multiplies all of them, and a row
// reads what its own experts gave. So rows are not sorted or moved; an expert needs no more than a mask of its rows.
#pragma once
#include "quantised.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS;
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
  u32 zero;                // 0, which the compiler does not know
};

// Of the experts that any row chose: their numbers in ascending order; and what each row chose, best first.
struct Choice {
  int count;
  u32 masks[EXPERTS];
  int experts[MAX_ROWS * TOP];
  int chosen[MAX_ROWS][TOP];
  float weights[MAX_ROWS][TOP];
};

// A warp a row: TOP best of score + bias, ties by the lowest number; weights from the scores without the bias.
DEV void choose_row(const Params& p, Choice& c, int row, int lane) {
  constexpr int EACH = EXPERTS / 32;
  float score[EACH];
  u32 key[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float x = __ldcg(p.logits + row * EXPERTS + i * 32 + lane);
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

// Eight e2m1 as four pairs of float16 of 2^-14 of their values. A pair's bits lie as close to their places as 16 bits
// allow: sign, exponent and mantissa of pairs 0 and 1 together, those of 2 and 3 apart. See deepseek_v4/experts.py.
DEV void fp4_to_half(u32 w, u32 (&a)[4]) {
  constexpr u32 ALL = 0x8e008e00u, SIGNS = 0x80008000u, REST = 0x0e000e00u;
  a[0] = w & ALL;
  a[1] = (w << 3) & ALL;
  a[2] = ((w << 1) & SIGNS) | ((w << 6) & REST);
  a[3] = ((w << 2) & SIGNS) | ((w << 9) & REST);
}
// One group of 32 inputs: weights of output g in w.x, of g + 8 in w.y, and their scales; b: row g, inputs 8q .. 8q + 7.
DEV void add_group(float (&sum)[4], uint2 w, u32 scale_g, u32 scale_g8, uint4 b) {
  u32 low[4], high[4];
  fp4_to_half(w.x, low);
  fp4_to_half(w.y, high);
  float d[4] = {0, 0, 0, 0};
  mma_half(d, low[0], high[0], low[1], high[1], b.x, b.y);
  mma_half(d, low[2], high[2], low[3], high[3], b.z, b.w);
  const float s0 = __uint_as_float(scale_g << 23), s1 = __uint_as_float(scale_g8 << 23);
  sum[0] += d[0] * s0;
  sum[1] += d[1] * s0;
  sum[2] += d[2] * s1;
  sum[3] += d[3] * s1;
}

// A warp's own ring of chunks, filled ahead by bulk copies. Chunks come item after item, CHUNKS of each, one behind
// the other from the address that `place(item)` gives.
template <int CHUNK_PAIRS, int CHUNKS, int DEPTH>
struct Ring {
  static constexpr int BYTES = CHUNK_PAIRS * PAIR_ALL;
  u32 pages, barriers, page = 0, phase = 0, full = 0;  // the page that is read next, its phase, the page to fill next
  int item, end, chunk = 0;                            // what is copied next
  const u8* from = nullptr;
  u64 policy = read_once_policy();

  DEV Ring(u32 pages_at, u32 barriers_at, int begin, int end_at)
      : pages(pages_at), barriers(barriers_at), item(begin), end(end_at) {}
  template <class Place>
  DEV void fill(Place place, u32 nothing = 0) {  // by one lane
    if (item == end) return;
    if (chunk == 0) from = place(item);
    barrier_expect(barriers + full * 8, BYTES);
    copy_bulk(pages + full * BYTES + nothing, from, BYTES, barriers + full * 8, policy);
    from += BYTES;
    full = full + 1 == DEPTH ? 0 : full + 1;
    if (++chunk == CHUNKS) chunk = 0, item++;
  }
  template <class Place>
  DEV void start(int lane, Place place) {
    if (lane == 0)
      for (int i = 0; i < DEPTH; i++) fill(place);
  }
  // Waits for the next chunk; false: it never came.
  DEV bool wait(u32 limit) {
    u32 polls = 0;
    while (!barrier_done(barriers + page * 8, phase))
      if (++polls > limit) return false;
    return true;
  }
  DEV u32 address() { return pages + page * BYTES; }
  // Gives the page back. Loads return in their order: `nothing` is 0 and made from the last value loaded, so that the
  // copy that fills the page again cannot overtake any of them.
  template <class Place>
  DEV void release(int lane, u32 nothing, Place place) {
    __syncwarp();
    if (lane == 0) fill(place, nothing);
    page = page + 1 == DEPTH ? 0 : page + 1;
    phase ^= page == 0;
  }
};
DEV u32 load_shared_word(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
// One chunk: its weights are loaded, its page is given back, then the last of them are multiplied by the rows at `rows`,
// 512 bytes a group. Two or three pairs at a time, as registers allow.
template <int CHUNK_PAIRS, class AnyRing, class Place>
DEV void multiply_chunk(float (&sum)[4], AnyRing& ring, u32 rows, int lane, u32 zero, Place place) {
  constexpr int BATCH = CHUNK_PAIRS % 3 ? 2 : 3;
  const u32 page = ring.address(), scales = page + CHUNK_PAIRS * PAIR_BYTES + lane / 4 * 4;
#pragma unroll
  for (int from = 0; from < CHUNK_PAIRS; from += BATCH) {
    uint4 w[BATCH], x[BATCH * 2];
    u32 s[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i < CHUNK_PAIRS) {
        x[2 * i] = load_shared(rows + 2 * (from + i) * 512 + lane * 16);
        x[2 * i + 1] = load_shared(rows + (2 * (from + i) + 1) * 512 + lane * 16);
        s[i] = load_shared_word(scales + (from + i) * PAIR_SCALES);
        w[i] = load_shared(page + (from + i) * PAIR_BYTES + lane * 16);
      }
    if (from + BATCH >= CHUNK_PAIRS) ring.release(lane, w[CHUNK_PAIRS - 1 - from].w & zero, place);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (from + i < CHUNK_PAIRS) {
        add_group(sum, make_uint2(w[i].x, w[i].y), s[i] & 255, s[i] >> 8 & 255, x[2 * i]);
        add_group(sum, make_uint2(w[i].z, w[i].w), s[i] >> 16 & 255, s[i] >> 24, x[2 * i + 1]);
      }
  }
}
