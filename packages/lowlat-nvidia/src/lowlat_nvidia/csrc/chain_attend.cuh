// Attention of one row by a cluster of 8 blocks. A block has 16 window entries (FP8) and 64 chosen ones (FP4), all but the
// step's own in shared memory as float16, which holds both formats exactly, before the queries exist.
//
// A block of 32 dimensions lies in four segments of 16 bytes: segment j has the pairs (8q + j, 8q + j + 4), q = 0 .. 3. So
// lane q of the matrix instructions has dimensions 8q .. 8q + 7 of queries, keys and sums alike.
#pragma once
#include "chain.cuh"

constexpr int BLOCKS_A_ROW = 8, OLD_KEYS = WINDOW / BLOCKS_A_ROW, NEW_KEYS = CHOSEN / BLOCKS_A_ROW;
constexpr int BLOCK_KEYS = OLD_KEYS + NEW_KEYS, KEY_TILES = BLOCK_KEYS / 8;
constexpr int KEY_BYTES = DIM * 2 + 16;        // padded, so that neighbours lie in other banks
constexpr int PARTS = 4, PART = DIM / PARTS;  // warps that share the inputs of scores; their inputs
constexpr int WARP_DIMS = DIM / WARPS;        // outputs of a warp
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(OLD_KEYS == 16 && NEW_KEYS == 64, "units");

struct AttendShared {
  alignas(128) u8 keys[BLOCK_KEYS * KEY_BYTES];
  union {
    float partial[PARTS][HEADS][BLOCK_KEYS];
    unsigned short parts[BLOCKS_A_ROW][2][DIM];  // from all blocks, means over their keys for this block's two heads; float16
  };
  alignas(16) u8 weights[HEADS][BLOCK_KEYS * 2 + 16];
  float2 state[HEADS];  // largest score and sum of weights of this block's keys
  float2 states[BLOCKS_A_ROW][2];
  int valid[BLOCK_KEYS];
  alignas(16) float angles[2][ROTATED / 2], sinks[2];  // of this row; of this block's heads
  u64 joined;
};

DEV u8* window_data(const Chain& p, int entry) {
  return p.window + entry / p.window_entries_a_page * p.window_page + entry % p.window_entries_a_page * (long long)DIM;
}
DEV u8* window_scales(const Chain& p, int entry) {
  return p.window + entry / p.window_entries_a_page * p.window_page + (long long)p.window_entries_a_page * DIM +
         entry % p.window_entries_a_page * (DIM / 32);
}
DEV const u8* chosen_data(const Chain& p, int entry) {
  return p.chosen + entry / p.chosen_entries_a_page * p.chosen_page + entry % p.chosen_entries_a_page * (DIM / 2);
}
DEV const u8* chosen_scales(const Chain& p, int entry) {
  return p.chosen + entry / p.chosen_entries_a_page * p.chosen_page + p.chosen_entries_a_page * (DIM / 2) +
         entry % p.chosen_entries_a_page * (DIM / 16);
}
DEV int entry_of(const Chain& p, int row, int place) {  // window first
  return __ldcg(place < WINDOW ? p.window_entries + row * WINDOW + place : p.chosen_entries + row * CHOSEN + place - WINDOW);
}
DEV void fetch_entry(const Chain& p, int entry, bool old) {
  const u8* data = old ? window_data(p, entry) : chosen_data(p, entry);
  for (int i = 0; i < (old ? DIM : DIM / 2); i += 128) fetch_line_into_l2(data + i);
  fetch_line_into_l2(old ? window_scales(p, entry) : chosen_scales(p, entry));
}
DEV u32 half_twice(float x) { return half_pair(x, x); }
// 32 dimensions of a key, as stored.
struct Fp8Unit {
  uint4 low, high;
  u32 power;
};
struct Fp4Unit {
  uint4 codes;
  u32 scales;  // two e4m3
};
DEV Fp8Unit load_fp8(const Chain& p, int entry, int block) {
  Fp8Unit u = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0), 127};
  if (entry < 0) return u;
  const uint4* from = (const uint4*)(window_data(p, entry) + block * 32);
  u.low = __ldcg(from), u.high = __ldcg(from + 1);
  u.power = __ldcg(window_scales(p, entry) + block);
  return u;
}
DEV Fp4Unit load_fp4(const Chain& p, int entry, int block) {
  Fp4Unit u = {make_uint4(0, 0, 0, 0), 0};
  if (entry < 0) return u;
  u.codes = __ldcg((const uint4*)(chosen_data(p, entry) + block * 16));
  u.scales = __ldcg((const unsigned short*)(chosen_scales(p, entry) + block * 2));
  return u;
}
DEV void store_fp8(u8* keys, int key, int block, const Fp8Unit& u) {
  const u32 w[8] = {u.low.x, u.low.y, u.low.z, u.low.w, u.high.x, u.high.y, u.high.z, u.high.w};
  const u32 scale = half_twice(__uint_as_float(u.power << 23));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 out[4];
#pragma unroll
    for (int q = 0; q < 4; q++)
      out[q] = multiply_halves(fp8_pair_to_half(__byte_perm(w[2 * q], w[2 * q + 1], (4 + j) << 4 | j)), scale);
    *(uint4*)(keys + key * KEY_BYTES + block * 64 + j * 16) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
DEV void store_fp4(u8* keys, int key, int block, const Fp4Unit& u) {
  const u32 w[4] = {u.codes.x, u.codes.y, u.codes.z, u.codes.w};
  const u32 two = fp8_pair_to_half(u.scales), scales[2] = {__byte_perm(two, 0, 0x1010), __byte_perm(two, 0, 0x3232)};
  constexpr u32 SIGNS = 0x80008000u, REST = 0x0e000e00u, UP = 0x74007400u;  // 2^14 twice
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 out[4];
#pragma unroll
    for (int q = 0; q < 4; q++) {  // codes j and j + 4 at the tops of the halves, as float16 of 2^-14 of their values
      const u32 t = w[q] << (12 - 4 * j);
      out[q] = multiply_halves(multiply_halves((t & SIGNS) | ((t >> 3) & REST), UP), scales[q / 2]);
    }
    *(uint4*)(keys + key * KEY_BYTES + block * 64 + j * 16) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}
DEV void rotate(float c, float n, float& even, float& odd) {
  const float e = even;
  even = e * c - odd * n, odd = e * n + odd * c;
}
// A warp: the key of a row of this step, normed, rotated, as FP8 with a scale for 32 values; into `key`, and where `write`
// into its entry, too. A lane has 16 dimensions.
DEV void make_key(const Chain& p, AttendShared& s, int row, int key, bool write, int lane) {
  uint4 raw[2], norm[2];
  float c[8], n[8];
  const int first = max(lane * 16 - (DIM - ROTATED), 0) / 2;
#pragma unroll
  for (int k = 0; k < 8; k++) c[k] = __ldcg(p.angles + row * ROTATED + first + k);
#pragma unroll
  for (int k = 0; k < 8; k++) n[k] = __ldcg(p.angles + row * ROTATED + ROTATED / 2 + first + k);
#pragma unroll
  for (int i = 0; i < 2; i++) norm[i] = load_constant(p.key_norm + lane * 32 + i * 16);
  take(p, raw, [&](int i) { return p.latent + (row * LATENT + QUERY_LATENT) * 2 + lane * 32 + i * 16; });
  float v[16], square = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float x[8];
    unpack_bf16(raw[i], x);
#pragma unroll
    for (int k = 0; k < 8; k++) v[i * 8 + k] = x[k], square += x[k] * x[k];
  }
#pragma unroll
  for (int o = 16; o; o /= 2) square += __shfl_xor_sync(~0u, square, o);
  const float factor = rsqrtf(square / DIM + p.eps);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float weight[8];
    unpack_bf16(norm[i], weight);
#pragma unroll
    for (int k = 0; k < 8; k++) v[i * 8 + k] = bf_round(v[i * 8 + k] * factor * weight[k]);
  }
  if (lane >= (DIM - ROTATED) / 16)
#pragma unroll
    for (int k = 0; k < 16; k += 2) {
      rotate(c[k / 2], n[k / 2], v[k], v[k + 1]);
      v[k] = bf_round(v[k]), v[k + 1] = bf_round(v[k + 1]);
    }
#pragma unroll
  for (int k = 0; k < 16; k++) largest = fmaxf(largest, fabsf(v[k]));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  const u32 bits = __float_as_uint(fmaxf(__fdiv_rn(largest, 448.f), 1e-4f)), power = (bits + 0x7fffffu) >> 23;
  u32 word[4];
#pragma unroll
  for (int i = 0; i < 4; i++) word[i] = rounded_fp8(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3], power);
  const u32 scale = half_twice(__uint_as_float(power << 23));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 a = multiply_halves(fp8_pair_to_half(__byte_perm(word[0], word[1], (4 + j) << 4 | j)), scale);
    const u32 b = multiply_halves(fp8_pair_to_half(__byte_perm(word[2], word[3], (4 + j) << 4 | j)), scale);
    *(uint2*)(s.keys + key * KEY_BYTES + lane / 2 * 64 + j * 16 + lane % 2 * 8) = make_uint2(a, b);
  }
  if (!write) return;
  const int entry = p.window_entries[row * WINDOW + WINDOW - 1];
  *(uint4*)(window_data(p, entry) + lane * 16) = make_uint4(word[0], word[1], word[2], word[3]);
  if (lane % 2 == 0) window_scales(p, entry)[lane / 2] = (u8)power;
}
// This warp's 128 inputs of all heads' queries, rotated where they are the last ones: heads g and g + 8, inputs 8q + j and
// 8q + j + 4 of each 32.
DEV void load_query(const Chain& p, const AttendShared& s, int row, int part, int lane, u32 (&a)[PART / 32][2][4]) {
  const int g = lane / 4, q = lane % 4;
  uint4 raw[PART / 32 * 2];
  take(p, raw, [&](int i) {
    return p.query + ((row * HEADS + g + i % 2 * 8) * DIM + part * PART + i / 2 * 32 + q * 8) * 2;
  });
#pragma unroll
  for (int i = 0; i < PART / 32 * 2; i++) {
    float v[8];
    unpack_bf16(raw[i], v);
    constexpr int PLAIN = PART - ROTATED;  // inputs of the last part that are not rotated
    if (i / 2 * 32 >= PLAIN && part == PARTS - 1)
#pragma unroll
      for (int k = 0; k < 8; k += 2) {
        const int pair = (i / 2 * 32 - PLAIN + q * 8 + k) / 2;
        rotate(s.angles[0][pair], s.angles[1][pair], v[k], v[k + 1]);
        v[k] = bf_round(v[k]), v[k + 1] = bf_round(v[k + 1]);
      }
#pragma unroll
    for (int j = 0; j < 4; j++) a[i / 2][i % 2][j] = half_pair(v[j], v[j + 4]);
  }
}
// Scores of half of the keys over this warp's inputs: all tiles' sums at once, as each is a chain.
DEV void score(AttendShared& s, int part, int half, int lane, const u32 (&a)[PART / 32][2][4]) {
  constexpr int TILES = KEY_TILES / 2;
  const int g = lane / 4, q = lane % 4, first = half * TILES * 8;
  const u32 keys = shared_address(s.keys) + (first + lane % 8) * KEY_BYTES + part * PART * 2 + lane / 8 * 16;
  float d[TILES][4] = {};
#pragma unroll
  for (int k = 0; k < PART / 32; k++) {
    u32 b[TILES][4];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) load_matrices(b[tile], keys + tile * 8 * KEY_BYTES + k * 64);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) mma_half(d[tile], a[k][0][0], a[k][1][0], a[k][0][1], a[k][1][1], b[tile][0], b[tile][1]);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) mma_half(d[tile], a[k][0][2], a[k][1][2], a[k][0][3], a[k][1][3], b[tile][2], b[tile][3]);
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    *(float2*)&s.partial[part][g][first + tile * 8 + q * 2] = make_float2(d[tile][0], d[tile][1]);
    *(float2*)&s.partial[part][g + 8][first + tile * 8 + q * 2] = make_float2(d[tile][2], d[tile][3]);
  }
}
// Half a warp has a head: weights of this block's keys, as float16.
DEV void soften(AttendShared& s, int warp, int lane) {
  constexpr int EACH = BLOCK_KEYS / 16;
  const int head = warp * 2 + lane / 16, key = lane % 16;
  float x[EACH], most = -1e30f, sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < PARTS; w++) total += s.partial[w][head][key + i * 16];
    x[i] = s.valid[key + i * 16] ? total * (0.04419417382415922f * LOG2_E) : -1e30f;  // 1 / sqrt(512)
    most = fmaxf(most, x[i]);
  }
#pragma unroll
  for (int o = 8; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const u32 weight = half_pair(x[i] > -1e30f ? fast_exp2(x[i] - most) : 0.f, 0.f);
    sum += half_low(weight);
    ((unsigned short*)s.weights[head])[key + i * 16] = (unsigned short)weight;
  }
#pragma unroll
  for (int o = 8; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (key == 0) s.state[head] = make_float2(most, sum);
}
// Sums of this warp's 64 outputs.
DEV void mix(AttendShared& s, int warp, int lane, float (&o)[WARP_DIMS / 8][4]) {
#pragma unroll
  for (int k = 0; k < BLOCK_KEYS / 16; k++) {
    u32 a[4];
    load_matrices(a, shared_address(s.weights[lane % 16]) + k * 32 + lane / 16 * 16);
#pragma unroll
    for (int n = 0; n < WARP_DIMS / 8; n += 2) {
      u32 b[4];
      load_matrices_transposed(b, shared_address(s.keys) + (k * 16 + lane % 16) * KEY_BYTES + warp * WARP_DIMS * 2 + (n + lane / 16) * 16);
      mma_half(o[n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_half(o[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    }
  }
}
// Block b gets heads 2b and 2b + 1 of all: means over this block's keys, which float16 can hold.
DEV void send_parts(AttendShared& s, int self, int warp, int lane, const float (&o)[WARP_DIMS / 8][4]) {
  const int g = lane / 4, q = lane % 4, thread = threadIdx.x;
#pragma unroll
  for (int high = 0; high < 2; high++) {
    const u32 block = g / 2 + high * 4, barrier = address_in_block(shared_address(&s.joined), block);
    const u32 to = address_in_block(shared_address(&s.parts[self][g % 2][warp * WARP_DIMS + q * 8]), block);
    const float factor = __fdividef(1.f, fmaxf(s.state[g + high * 8].y, 1e-30f));
#pragma unroll
    for (int k = 0; k < WARP_DIMS / 32; k++) {
      u32 word[4];  // dimensions 0 .. 3 of the lane's 8, then 4 .. 7
#pragma unroll
      for (int i = 0; i < 4; i++)
        word[i] = half_pair(o[k * 4 + i % 2 * 2][high * 2 + i / 2] * factor, o[k * 4 + i % 2 * 2 + 1][high * 2 + i / 2] * factor);
      send(to + k * 64, __uint_as_float(word[0]), __uint_as_float(word[1]), __uint_as_float(word[2]), __uint_as_float(word[3]), barrier);
    }
  }
  if (thread < HEADS)
    send(address_in_block(shared_address(&s.states[self][thread % 2]), thread / 2), s.state[thread].x, s.state[thread].y,
         address_in_block(shared_address(&s.joined), thread / 2));
}
// This block's two heads: means of all blocks in order, by their weight, with the sink; rotated back, in FP8, published. A
// thread has four neighbours.
DEV void publish_mixed(const Chain& p, AttendShared& s, int row, int self) {
  const int thread = threadIdx.x, slot = thread / (DIM / 4), head = self * 2 + slot, dim = thread % (DIM / 4) * 4;
  const float sink = s.sinks[slot];
  float most = sink;
#pragma unroll
  for (int b = 0; b < BLOCKS_A_ROW; b++) most = fmaxf(most, s.states[b][slot].x);
  float sum = fast_exp2(sink - most), v[4] = {0, 0, 0, 0};
#pragma unroll
  for (int b = 0; b < BLOCKS_A_ROW; b++) {
    const float2 state = s.states[b][slot];
    const float weight = state.y * fast_exp2(state.x - most);
    const uint2 part = *(const uint2*)&s.parts[b][slot][dim];
    sum += weight;
    v[0] += half_low(part.x) * weight, v[1] += half_low(part.x >> 16) * weight;
    v[2] += half_low(part.y) * weight, v[3] += half_low(part.y >> 16) * weight;
  }
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = __fdividef(v[k], sum);
  if (dim >= DIM - ROTATED)
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      const int pair = (dim - (DIM - ROTATED) + k) / 2;
      rotate(s.angles[0][pair], -s.angles[1][pair], v[k], v[k + 1]);
    }
  float largest = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = bf_round(v[k]), largest = fmaxf(largest, fabsf(v[k]));
#pragma unroll
  for (int o = 1; o < 8; o *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, o));
  const u32 power = group_power(largest);
  store_exchange(p.mixed + (row * HEADS + head) * DIM + dim, rounded_fp8(v[0], v[1], v[2], v[3], power));
  if (thread % 8 == 0)
    store_exchange(p.mixed_scales + (row * HEADS + head) * (DIM / GROUP) + dim / GROUP, __float_as_uint(power_value(power)));
}
DEV void attend_row(const Chain& p, AttendShared& s, int row, int self) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, octet = lane % 8;
  stamp(p, 2, 0);
  const int old_key = warp / 4 * 8 + octet, new_key = warp * 8 + octet, own = WINDOW - 1 - row - self * OLD_KEYS;
  const int old_entry = entry_of(p, row, self * OLD_KEYS + old_key);
  const int new_entry = entry_of(p, row, WINDOW + self * NEW_KEYS + new_key);
  if (thread < ROTATED) s.angles[thread / (ROTATED / 2)][thread % (ROTATED / 2)] = __ldcg(p.angles + row * ROTATED + thread);
  if (thread < 2) s.sinks[thread] = __ldcg(p.sinks + self * 2 + thread) * LOG2_E;
  if (thread == 0) {
    barrier_init(shared_address(&s.joined), 1);
    barriers_for_cluster();
    barrier_expect(shared_address(&s.joined), sizeof(s.parts) + sizeof(s.states));
  }
  const bool old_here = old_key < own;  // the others are made in this step
  const Fp8Unit old_unit = load_fp8(p, old_here ? old_entry : -1, warp % 4 * 4 + lane / 8);
  Fp4Unit units[4];
#pragma unroll
  for (int i = 0; i < 4; i++) units[i] = load_fp4(p, new_entry, i * 4 + lane / 8);
  if (lane < 8) {
    if (warp % 4 == 0) s.valid[old_key] = old_entry >= 0;
    s.valid[OLD_KEYS + new_key] = new_entry >= 0;
  }
  __syncthreads();
  stamp(p, 2, 1);
  if (old_here) store_fp8(s.keys, old_key, warp % 4 * 4 + lane / 8, old_unit);
#pragma unroll
  for (int i = 0; i < 4; i++) store_fp4(s.keys, OLD_KEYS + new_key, i * 4 + lane / 8, units[i]);
  if (self == BLOCKS_A_ROW - 1 && warp <= row) make_key(p, s, warp, own + warp, warp == row, lane);
  stamp(p, 2, 2);
  const int part = warp % PARTS, half = warp / PARTS;
  u32 a[PART / 32][2][4];
  load_query(p, s, row, part, lane, a);
  __syncthreads();
  let_next_kernel_start();  // the words that this kernel will publish have been emptied by those whose words it has got
  stamp(p, 2, 3);
  score(s, part, half, lane, a);
  __syncthreads();
  soften(s, warp, lane);
  __syncthreads();
  cluster_here();  // partial sums have been read: their memory takes what the other blocks send
  stamp(p, 2, 4);
  float o[WARP_DIMS / 8][4] = {};
  mix(s, warp, lane, o);
  cluster_wait();
  stamp(p, 2, 5);
  send_parts(s, self, warp, lane, o);
  wait_for_copy(p, shared_address(&s.joined));
  __syncwarp();
  stamp(p, 2, 6);
  publish_mixed(p, s, row, self);
  stamp(p, 2, 7);
}
