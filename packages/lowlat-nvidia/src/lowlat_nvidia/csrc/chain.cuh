// What the four kernels of the attention region share: their parameter, words that are empty until they are published,
// and stores into the other blocks of a cluster.
#pragma once
#include "quantised.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int DIM = 512, ROTATED = 64, HEADS = 16, WINDOW = 128, CHOSEN = 512;
constexpr int LATENT = QUERY_LATENT + DIM;  // outputs of the first kernel
constexpr int GROUP_INPUTS = HEADS / GROUPS * DIM;

struct Chain {
  const u8* x;                // [rows][HIDDEN] bfloat16
  const u8* down;             // packed; block scales [LATENT / 32][HIDDEN / 32]
  const float* down_scales;
  const u8* up;               // packed; [HEADS * DIM / 32][QUERY_LATENT / 32]
  const float* up_scales;
  const u8* group;            // packed; [GROUPS * GROUP_OUTPUTS / 32][GROUP_INPUTS / 32]
  const float* group_scales;
  const u8 *query_norm, *key_norm;  // bfloat16
  const float* sinks;         // [HEADS]
  const float* angles;        // [rows][2][ROTATED / 2]: cosine and sine at each row's position
  u8* window;                 // pages of FP8 entries: all data, then all scales
  const u8* chosen;           // pages of FP4 entries alike
  const int* window_entries;  // [rows][WINDOW], -1: none; the last row + 1 are of this step
  const int* chosen_entries;  // [rows][CHOSEN], -1: none
  u8* latent;                 // published: [MAX_ROWS][LATENT] bfloat16
  u8* query;                  // published: [MAX_ROWS][HEADS][DIM] bfloat16
  u8* mixed;                  // published: [MAX_ROWS][HEADS][DIM] e4m3
  u32* mixed_scales;          // published: [MAX_ROWS][HEADS * DIM / 32] float32
  u8* out;                    // [rows][GROUPS * GROUP_OUTPUTS] bfloat16
  u32* error;
  u64* stamps;                // [4][256][STAMPS_A_BLOCK], in builds with STAMPS
  long long window_page, chosen_page;  // bytes
  int window_entries_a_page, chosen_entries_a_page, rows;
  float eps;
  u32 spin_limit;
};

// A published word is never this: it is NaN as a float, as two bfloat16 and as four e4m3, with bits that no conversion makes.
constexpr u32 EMPTY = 0xffffffffu;
DEV bool is_empty(uint4 v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }
// Asks again for what is missing; false if nothing was.
template <int COUNT, class Address>
DEV bool ask(uint4 (&v)[COUNT], Address address) {
  bool missing = false;
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (is_empty(v[i])) v[i] = load_exchange(address(i)), missing = true;
  return missing;
}
template <int COUNT, class Address>
DEV bool ask(u32 (&v)[COUNT], Address address) {
  bool missing = false;
#pragma unroll
  for (int i = 0; i < COUNT; i++)
    if (v[i] == EMPTY) v[i] = load_exchange_word(address(i)), missing = true;
  return missing;
}
template <class Missing>
DEV void until_there(const Chain& p, Missing missing) {
  for (u32 polls = 0; missing(); polls++)
    if (polls > p.spin_limit) {
      *p.error = 1;
      return;
    }
}
// COUNT times 16 bytes that other blocks publish.
template <int COUNT, class Address>
DEV void take(const Chain& p, uint4 (&v)[COUNT], Address address) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) v[i] = load_exchange(address(i));
  until_there(p, [&] { return ask(v, address); });
}
DEV void wait_for_copy(const Chain& p, u32 barrier) {
  until_there(p, [&] { return !barrier_done(barrier, 0); });
}

// One thread of each block: a part of a later kernel's weights on its way to the L2.
DEV void fetch_weights(const u8* from, int bytes) {
  constexpr int PIECE = 16384;
  for (int i = blockIdx.x; i < bytes / PIECE; i += gridDim.x) fetch_into_l2(from + (long long)i * PIECE, PIECE);
}

constexpr int STAMPS_A_BLOCK = 8;
DEV void stamp(const Chain& p, int kernel, int phase) {
#if STAMPS
  if (threadIdx.x == 0) p.stamps[(kernel * 256 + blockIdx.x) * STAMPS_A_BLOCK + phase] = nanoseconds_now();
#endif
}
