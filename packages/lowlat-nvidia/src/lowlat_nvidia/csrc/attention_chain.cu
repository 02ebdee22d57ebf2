// The attention region of a DeepSeek-V4.1 layer for at most 8 rows, four kernels under programmatic dependent launch:
//   down_project   x -> wq_a and wkv
//   up_project     norm of the query latent, wq_b; norm, rotation and FP8 of the new keys, which go into the window
//   attend         rotation of the queries as they are loaded, 128 window entries (FP8) and 512 chosen ones (FP4), sinks,
//                  inverse rotation
//   group_project  wo_a of each group of heads
// The first lets the next start once all that came before this chain is done, the others at once: each loads what does
// not depend on this chain (its weights; all entries but the step's own) before it waits. What an earlier kernel wrote
// is read through L2: L1 may be older.
#include "quantised.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int DIM = 512, ROTATED = 64, HEADS = 16, WINDOW = 128, CHOSEN = 512, KEYS = WINDOW + CHOSEN;
constexpr int LATENT = QUERY_LATENT + DIM;  // outputs of the first kernel
constexpr int DOWN_SPLIT = 8, UP_SPLIT = 2, GROUP_SPLIT = 8;  // warps that share a tile of 16 outputs
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
  float* latent;              // [MAX_ROWS][LATENT]
  u8* query;                  // [rows][HEADS][DIM] bfloat16
  u8* mixed;                  // [rows][HEADS][DIM] bfloat16
  u8* out;                    // [rows][GROUPS * GROUP_OUTPUTS] bfloat16
  u32* error;
  long long window_page, chosen_page;  // bytes
  int window_entries_a_page, chosen_entries_a_page, rows;
  float eps;
  u32 spin_limit;
};

// ---- products: 16 outputs a tile, weights whole in shared memory before the rows exist

template <int INPUTS, int SPLIT>
struct Product {
  static constexpr int TILES = WARPS / SPLIT, EACH = INPUTS / GROUP / SPLIT;  // tiles of a block, groups of a warp
  static constexpr int BYTES = TILES * INPUTS * 16;
  static_assert(INPUTS % (GROUP * WARPS) == 0, "groups");
  struct Shared {
    alignas(16) float parts[WARPS][16 * MAX_ROWS];
    alignas(16) float units[WARPS][MAX_ROWS];
    float scales[TILES][INPUTS / GROUP];
    u32 powers[WARPS][MAX_ROWS];
    u64 barrier;
    alignas(16) uint4 rows[TILES == 1 ? 1 : INPUTS / GROUP][32];
  };

  // Starts the copy of this block's weights and scales; call before anything is waited for.
  static DEV void start(u8* memory, Shared& s, const u8* weights, const float* scales) {
    if (threadIdx.x == 0) {
      const u32 barrier = shared_address(&s.barrier);
      barrier_init(barrier, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      barrier_expect(barrier, BYTES);
      const u64 policy = read_once_policy();
      for (int i = 0; i < 8; i++)
        copy_bulk(shared_address(memory) + i * (BYTES / 8), weights + (long long)blockIdx.x * BYTES + i * (BYTES / 8),
                  BYTES / 8, barrier, policy);
    }
    for (int i = threadIdx.x; i < TILES * (INPUTS / GROUP); i += THREADS) {
      const int tile = blockIdx.x * TILES + i / (INPUTS / GROUP);
      s.scales[i / (INPUTS / GROUP)][i % (INPUTS / GROUP)] = scales[tile / 2 * (INPUTS / GROUP) + i % (INPUTS / GROUP)];
    }
    __syncthreads();
  }
  // `load(row, input, v)` gives 8 neighbouring inputs of a row; `store(tile, n, row, x)` takes the sums.
  template <class Load, class Store>
  static DEV void run(u8* memory, Shared& s, u32 spin_limit, u32* error, Load load, Store store) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, tile = warp / SPLIT, part = warp % SPLIT;
    const int g = lane / 4, q = lane % 4;
    uint4 x[EACH];
    if constexpr (TILES == 1) {  // every warp has inputs of its own
      const u32 unit = quantise_share<EACH>(x, [&](int i, float(&v)[8]) { load(g, (part * EACH + i) * GROUP + q * 8, v); });
      if (q == 0) s.units[warp][g] = power_value(unit);
    } else {  // each quantises an eighth, and takes the others' from shared memory
      constexpr int SHARE = INPUTS / GROUP / WARPS;
      uint4 mine[SHARE];
      const u32 unit =
          quantise_share<SHARE>(mine, [&](int i, float(&v)[8]) { load(g, (warp * SHARE + i) * GROUP + q * 8, v); });
      if (q == 0) s.powers[warp][g] = unit;
      __syncthreads();
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) most = max(most, s.powers[w][g]);
#pragma unroll
      for (int i = 0; i < SHARE; i++) s.rows[warp * SHARE + i][lane] = in_units(mine[i], unit, most);
      if (q == 0) s.units[warp][g] = power_value(most);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < EACH; i++) x[i] = s.rows[part * EACH + i][lane];
    }
    __syncwarp();
    u32 polls = 0;
    while (!barrier_done(shared_address(&s.barrier), 0))
      if (++polls > spin_limit) {
        *error = 1;
        break;
      }
    const u32 from = shared_address(memory) + warp * EACH * 512 + lane * 16;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const uint4 w = load_shared(from + i * 512);
      u32 a0, a1, a2, a3, b0, b1, b2, b3;
      fp8_to_half(w.x, a0, a1);
      fp8_to_half(w.y, a2, a3);
      fp8_to_half(w.z, b0, b1);
      fp8_to_half(w.w, b2, b3);
      float d[4] = {0, 0, 0, 0};
      mma_half(d, a0, b0, a1, b1, x[i].x, x[i].y);
      mma_half(d, a2, b2, a3, b3, x[i].z, x[i].w);
      const float factor = s.scales[tile][part * EACH + i];
#pragma unroll
      for (int k = 0; k < 4; k++) sum[k] += d[k] * factor;
    }
    const float2 units = *(const float2*)&s.units[warp][q * 2];
    float* to = s.parts[warp] + g * MAX_ROWS + q * 2;
    *(float2*)to = make_float2(sum[0] * (units.x * FP8_TO_HALF), sum[1] * (units.y * FP8_TO_HALF));
    *(float2*)(to + 8 * MAX_ROWS) = make_float2(sum[2] * (units.x * FP8_TO_HALF), sum[3] * (units.y * FP8_TO_HALF));
    __syncthreads();
    for (int i = thread; i < TILES * 16 * MAX_ROWS; i += THREADS) {
      const int t = i / (16 * MAX_ROWS), row = i % (16 * MAX_ROWS) / 16, n = i % 16;
      float total = 0;
#pragma unroll
      for (int w = 0; w < SPLIT; w++) total += s.parts[t * SPLIT + w][n * MAX_ROWS + row];
      store(blockIdx.x * TILES + t, n, row, total);
    }
  }
};
using Down = Product<HIDDEN, DOWN_SPLIT>;
extern "C" __global__ void __launch_bounds__(THREADS) down_project(const Chain p) {
  extern __shared__ __align__(128) u8 memory[];
  Down::Shared& s = *(Down::Shared*)(memory + Down::BYTES);
  Down::start(memory, s, p.down, p.down_scales);
  wait_for_earlier_kernel();
  let_next_kernel_start();  // not before: what the others read early must be older than this chain
  auto load = [&](int row, int k, float(&v)[8]) {
    unpack_bf16(row < p.rows ? __ldcg((const uint4*)(p.x + ((long long)row * HIDDEN + k) * 2)) : make_uint4(0, 0, 0, 0), v);
  };
  Down::run(memory, s, p.spin_limit, p.error, load,
            [&](int tile, int n, int row, float x) { p.latent[row * LATENT + tile * 16 + n] = bf_round(x); });
}

using Up = Product<QUERY_LATENT, UP_SPLIT>;
// A warp: 1 / rms of COUNT values of a row's latent.
template <int COUNT>
DEV float inverse_rms(const float* x, int lane, float eps) {
  float square = 0;
  float4 v[COUNT / 128];
#pragma unroll
  for (int i = 0; i < COUNT / 128; i++) v[i] = __ldcg((const float4*)x + i * 32 + lane);
#pragma unroll
  for (int i = 0; i < COUNT / 128; i++) square += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
#pragma unroll
  for (int o = 16; o; o /= 2) square += __shfl_xor_sync(~0u, square, o);
  return rsqrtf(square / COUNT + eps);
}
DEV u8* window_data(const Chain& p, int entry) {
  return p.window + entry / p.window_entries_a_page * p.window_page + entry % p.window_entries_a_page * (long long)DIM;
}
DEV u8* window_scales(const Chain& p, int entry) {
  return p.window + entry / p.window_entries_a_page * p.window_page + (long long)p.window_entries_a_page * DIM +
         entry % p.window_entries_a_page * (DIM / 32);
}
// A block: the key of a row, normed, rotated, as FP8 with a scale for 32 values, into its entry; two groups a warp.
DEV void write_key(const Chain& p, int row, int warp, int lane) {
  const float* x = p.latent + row * LATENT + QUERY_LATENT;
  const float factor = inverse_rms<DIM>(x, lane, p.eps);
  const int entry = p.window_entries[row * WINDOW + WINDOW - 1];
#pragma unroll
  for (int group = warp; group < DIM / 32; group += WARPS) {
    const int i = group * 32 + lane;
    float v = bf_round(__ldcg(x + i) * factor * __uint_as_float((u32)((const unsigned short*)p.key_norm)[i] << 16));
    const float other = __shfl_xor_sync(~0u, v, 1);
    if (i >= DIM - ROTATED) {
      const int pair = (i - (DIM - ROTATED)) / 2;
      const float c = p.angles[row * ROTATED + pair], n = p.angles[row * ROTATED + ROTATED / 2 + pair];
      v = bf_round(lane % 2 ? other * n + v * c : v * c - other * n);
    }
    const float largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(v))));
    const u32 bits = __float_as_uint(fmaxf(__fdiv_rn(largest, 448.f), 1e-4f));
    const u32 power = (bits + 0x7fffffu) >> 23;
    unsigned short fp8;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(fp8) : "f"(0.f), "f"(v / __uint_as_float(power << 23)));
    window_data(p, entry)[i] = (u8)fp8;
    if (lane == 0) window_scales(p, entry)[group] = (u8)power;
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) up_project(const Chain p) {
  extern __shared__ __align__(128) u8 memory[];
  Up::Shared& s = *(Up::Shared*)(memory + Up::BYTES);
  __shared__ float factors[MAX_ROWS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  let_next_kernel_start();
  Up::start(memory, s, p.up, p.up_scales);
  wait_for_earlier_kernel();
  const float factor = inverse_rms<QUERY_LATENT>(p.latent + warp * LATENT, lane, p.eps);
  if (lane == 0) factors[warp] = factor;
  if (blockIdx.x < p.rows) write_key(p, blockIdx.x, warp, lane);
  __syncthreads();
  auto load = [&](int row, int k, float(&v)[8]) {
    float norm[8];
    unpack_bf16(*(const uint4*)(p.query_norm + k * 2), norm);
    const float4 a = __ldcg((const float4*)(p.latent + row * LATENT + k));
    const float4 b = __ldcg((const float4*)(p.latent + row * LATENT + k + 4));
    const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = bf_round(x[i] * factors[row] * norm[i]);
  };
  Up::run(memory, s, p.spin_limit, p.error, load, [&](int tile, int n, int row, float x) {
    const float next = __shfl_down_sync(~0u, x, 1);
    if (row < p.rows && n % 2 == 0) *(u32*)(p.query + ((long long)row * HEADS * DIM + tile * 16 + n) * 2) = bf_pair(x, next);
  });
}

// ---- attention: a cluster of 8 blocks a row, 80 keys a block in two passes of 40

constexpr int BLOCKS_A_ROW = 8, BLOCK_KEYS = KEYS / BLOCKS_A_ROW, PASS_KEYS = 40, PASSES = BLOCK_KEYS / PASS_KEYS;
constexpr int KEY_BYTES = DIM * 2 + 16;  // padded, so that neighbours lie in other banks
constexpr int CHUNKS = PASS_KEYS * (DIM / 16) / THREADS;  // chunks of 16 values of a thread
constexpr int TILE_DIMS = DIM / WARPS;                    // a warp's inputs of the scores, and outputs of the sums
static_assert(CHUNKS * THREADS == PASS_KEYS * (DIM / 16) && PASSES == 2, "passes");

struct AttendShared {
  alignas(16) u8 keys[48 * KEY_BYTES];  // rows 40 to 47 are zeros: the second product takes 16 keys at a time
  float partial[WARPS][HEADS][PASS_KEYS];
  alignas(16) u32 weights[HEADS][28];  // pairs of bfloat16, 48 keys, padded
  float most[HEADS], sum[HEADS], rescale[HEADS];
  float all_most[BLOCKS_A_ROW][HEADS], all_sum[BLOCKS_A_ROW][HEADS];
  float scale[HEADS];
  int valid[PASS_KEYS];
};
struct Chunk {
  uint4 data;
  float scale;
};
DEV int entry_of(const Chain& p, int row, int key) {
  return key < WINDOW ? p.window_entries[row * WINDOW + key] : p.chosen_entries[row * CHOSEN + key - WINDOW];
}
// 16 values of a key as stored.
DEV Chunk load_chunk(const Chain& p, int row, int key, int chunk) {
  Chunk c;
  const int entry = entry_of(p, row, key);
  c.data = make_uint4(0, 0, 0, 0);
  c.scale = 0;
  if (entry < 0) return c;
  if (key < WINDOW) {
    c.data = __ldcg((const uint4*)(window_data(p, entry) + chunk * 16));
    c.scale = __uint_as_float((u32)__ldcg(window_scales(p, entry) + chunk / 2) << 23);
  } else {
    const u8* page = p.chosen + entry / p.chosen_entries_a_page * p.chosen_page;
    const int in = entry % p.chosen_entries_a_page;
    const uint2 v = __ldcg((const uint2*)(page + in * (DIM / 2) + chunk * 8));
    c.data = make_uint4(v.x, v.y, 0, 0);
    const u32 s = page[p.chosen_entries_a_page * (DIM / 2) + in * (DIM / 16) + chunk];
    u32 half;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"((unsigned short)s));
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(c.scale) : "r"(half));
  }
  return c;
}
DEV float fp8_value(u32 byte) {  // e4m3 by float arithmetic: exponent and mantissa moved to a float's, bias mended
  return __uint_as_float((byte & 0x80u) << 24 | (byte & 0x7fu) << 20) * 0x1p120f;
}
DEV float fp4_value(u32 code) { return __uint_as_float((code & 8u) << 28 | (code & 7u) << 22) * 0x1p126f; }
// To shared memory as bfloat16: both formats fit it exactly.
DEV void unpack_chunk(u8* keys, int key, int chunk, bool fp8, const Chunk& c) {
  u32 out[8];
  const u32 words[4] = {c.data.x, c.data.y, c.data.z, c.data.w};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float a, b;
    if (fp8) {
      const u32 w = words[i / 2] >> (i % 2 * 16);
      a = fp8_value(w & 255), b = fp8_value(w >> 8 & 255);
    } else {
      const u32 w = words[i / 4] >> (i % 4 * 8);
      a = fp4_value(w & 15), b = fp4_value(w >> 4 & 15);
    }
    out[i] = bf_pair(a * c.scale, b * c.scale);
  }
  uint4* to = (uint4*)(keys + key * KEY_BYTES + chunk * 32);
  to[0] = make_uint4(out[0], out[1], out[2], out[3]);
  to[1] = make_uint4(out[4], out[5], out[6], out[7]);
}
DEV void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void load_matrices_transposed(u32 address, u32& b0, u32& b1) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(b0), "=r"(b1) : "r"(address) : "memory");
}
// This warp's 64 inputs of all heads' queries, rotated where they are the last ones.
DEV void load_query(const Chain& p, int row, int warp, int lane, u32 (&a)[TILE_DIMS / 16][4]) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int k = 0; k < TILE_DIMS / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = g + i % 2 * 8, dim = warp * TILE_DIMS + k * 16 + i / 2 * 8 + q * 2;
      u32 v = __ldcg((const u32*)(p.query + (((long long)row * HEADS + head) * DIM + dim) * 2));
      if (dim >= DIM - ROTATED) {
        const int pair = (dim - (DIM - ROTATED)) / 2;
        const float c = p.angles[row * ROTATED + pair], n = p.angles[row * ROTATED + ROTATED / 2 + pair];
        v = bf_pair(bf_low(v) * c - bf_high(v) * n, bf_low(v) * n + bf_high(v) * c);
      }
      a[k][i] = v;
    }
}
// Scores of 40 keys: every warp multiplies its inputs, partial sums meet in shared memory; then the running softmax.
DEV void score(AttendShared& s, int warp, int lane, const u32 (&a)[TILE_DIMS / 16][4]) {
  const int g = lane / 4, q = lane % 4;
#pragma unroll
  for (int tile = 0; tile < PASS_KEYS / 8; tile++) {
    float d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < TILE_DIMS / 16; k++) {
      const u8* key = s.keys + (tile * 8 + g) * KEY_BYTES + (warp * TILE_DIMS + k * 16 + q * 2) * 2;
      mma_bf16(d, a[k], *(const u32*)key, *(const u32*)(key + 16));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s.partial[warp][g + i / 2 * 8][tile * 8 + q * 2 + i % 2] = d[i];
  }
}
DEV void soften(AttendShared& s, int warp, int lane) {
  for (int head = warp; head < HEADS; head += WARPS) {
    float x[2], most = -1e30f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int key = lane + i * 32;
      x[i] = -1e30f;
      if (key < PASS_KEYS && s.valid[key]) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += s.partial[w][head][key];
        x[i] = total * 0.04419417382415922f;  // 1 / sqrt(512)
      }
      most = fmaxf(most, x[i]);
    }
#pragma unroll
    for (int o = 16; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    const float before = s.most[head], now = fmaxf(before, most);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int key = lane + i * 32;
      const float w = key < PASS_KEYS && s.valid[key] ? bf_round(expf(x[i] - now)) : 0.f;
      sum += w;
      if (key < 48) ((unsigned short*)s.weights[head])[key] = (unsigned short)(__float_as_uint(w) >> 16);
    }
#pragma unroll
    for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
    __syncwarp();
    if (lane == 0) {
      s.rescale[head] = expf(before - now);
      s.sum[head] = s.sum[head] * s.rescale[head] + sum;
      s.most[head] = now;
    }
  }
}
// Sums of this warp's 64 outputs: 16 heads x 48 keys by 48 keys x 64.
DEV void mix(AttendShared& s, int warp, int lane, float (&o)[TILE_DIMS / 8][4]) {
  const int g = lane / 4, q = lane % 4;
  const float low = s.rescale[g], high = s.rescale[g + 8];
  u32 a[3][4];
#pragma unroll
  for (int k = 0; k < 3; k++) {
    a[k][0] = s.weights[g][k * 8 + q];
    a[k][1] = s.weights[g + 8][k * 8 + q];
    a[k][2] = s.weights[g][k * 8 + q + 4];
    a[k][3] = s.weights[g + 8][k * 8 + q + 4];
  }
#pragma unroll
  for (int n = 0; n < TILE_DIMS / 8; n++) {
    o[n][0] *= low, o[n][1] *= low, o[n][2] *= high, o[n][3] *= high;
#pragma unroll
    for (int k = 0; k < 3; k++) {
      u32 b0, b1;
      load_matrices_transposed(shared_address(s.keys) + (k * 16 + lane % 16) * KEY_BYTES + (warp * TILE_DIMS + n * 8) * 2, b0, b1);
      mma_bf16(o[n], a[k], b0, b1);
    }
  }
}
DEV void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
DEV void store_to_block(const void* here, u32 block, float x) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(x) : "memory");
}
// Joins the blocks of a row: block b gets heads 2b and 2b + 1 of all, sums in order, rotates back and stores.
DEV void join(const Chain& p, AttendShared& s, int row, int self, float (&o)[TILE_DIMS / 8][4]) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, q = lane % 4;
  if (thread < HEADS * BLOCKS_A_ROW) {
    store_to_block(&s.all_most[self][thread % HEADS], thread / HEADS, s.most[thread % HEADS]);
    store_to_block(&s.all_sum[self][thread % HEADS], thread / HEADS, s.sum[thread % HEADS]);
  }
  cluster_sync();  // all have read their keys for the last time, too: their memory takes the parts now
  if (thread < HEADS) {
    float most = p.sinks[thread], sum = 0;
    for (int b = 0; b < BLOCKS_A_ROW; b++) most = fmaxf(most, s.all_most[b][thread]);
    for (int b = 0; b < BLOCKS_A_ROW; b++) sum += s.all_sum[b][thread] * expf(s.all_most[b][thread] - most);
    s.scale[thread] = expf(s.most[thread] - most) / (sum + expf(p.sinks[thread] - most));
  }
  __syncthreads();
  float* parts = (float*)s.keys;  // [block][2 heads][DIM]
#pragma unroll
  for (int n = 0; n < TILE_DIMS / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = g + i / 2 * 8, dim = warp * TILE_DIMS + n * 8 + q * 2 + i % 2;
      store_to_block(parts + (self * 2 + head % 2) * DIM + dim, head / 2, o[n][i] * s.scale[head]);
    }
  cluster_sync();
  for (int i = thread; i < DIM; i += THREADS) {  // a pair of neighbours of one of the two heads
    const int head = i / (DIM / 2), dim = i % (DIM / 2) * 2;
    float a = 0, b = 0;
#pragma unroll
    for (int k = 0; k < BLOCKS_A_ROW; k++) a += parts[(k * 2 + head) * DIM + dim], b += parts[(k * 2 + head) * DIM + dim + 1];
    if (dim >= DIM - ROTATED) {
      const int pair = (dim - (DIM - ROTATED)) / 2;
      const float c = p.angles[row * ROTATED + pair], n = p.angles[row * ROTATED + ROTATED / 2 + pair];
      const float x = a * c + b * n;
      b = b * c - a * n, a = x;
    }
    *(u32*)(p.mixed + (((long long)row * HEADS + self * 2 + head) * DIM + dim) * 2) = bf_pair(a, b);
  }
}
extern "C" __global__ void __cluster_dims__(BLOCKS_A_ROW) __launch_bounds__(THREADS, 2) attend(const Chain p) {
  extern __shared__ __align__(128) u8 memory[];
  AttendShared& s = *(AttendShared*)memory;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row = blockIdx.x / BLOCKS_A_ROW, self = blockIdx.x % BLOCKS_A_ROW;
  const int own = WINDOW - 1 - row;  // the first key that this step's kernels write
  Chunk chunks[CHUNKS];
  auto key_of = [&](int pass, int i) { return self * BLOCK_KEYS + pass * PASS_KEYS + (i * THREADS + thread) / (DIM / 16); };
  auto fetch = [&](int pass, bool early) {  // early: what may be read before the kernel before this one has ended
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int key = key_of(pass, i);
      const bool written_now = key >= own && key < WINDOW;
      if (early != written_now) chunks[i] = load_chunk(p, row, key, thread % (DIM / 16));
    }
  };
  auto unpack_all = [&](int pass) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      unpack_chunk(s.keys, (i * THREADS + thread) / (DIM / 16), thread % (DIM / 16), key_of(pass, i) < WINDOW, chunks[i]);
    if (thread < PASS_KEYS) s.valid[thread] = entry_of(p, row, self * BLOCK_KEYS + pass * PASS_KEYS + thread) >= 0;
  };
  let_next_kernel_start();
  for (int i = thread; i < 8 * KEY_BYTES / 4; i += THREADS) ((u32*)(s.keys + PASS_KEYS * KEY_BYTES))[i] = 0;
  if (thread < HEADS) s.most[thread] = -1e30f, s.sum[thread] = 0;
  fetch(0, true);
  unpack_all(0);  // the first pass holds no key of this step
  fetch(1, true);
  wait_for_earlier_kernel();
  fetch(1, false);
  u32 a[TILE_DIMS / 16][4];
  load_query(p, row, warp, lane, a);
  float o[TILE_DIMS / 8][4] = {};
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    if (pass) unpack_all(1);
    __syncthreads();
    score(s, warp, lane, a);
    __syncthreads();
    soften(s, warp, lane);
    __syncthreads();
    mix(s, warp, lane, o);
    __syncthreads();
  }
  join(p, s, row, self, o);
}

using Grouped = Product<GROUP_INPUTS, GROUP_SPLIT>;
extern "C" __global__ void __launch_bounds__(THREADS) group_project(const Chain p) {
  extern __shared__ __align__(128) u8 memory[];
  Grouped::Shared& s = *(Grouped::Shared*)(memory + Grouped::BYTES);
  let_next_kernel_start();
  Grouped::start(memory, s, p.group, p.group_scales);
  wait_for_earlier_kernel();
  const int group = blockIdx.x * Grouped::TILES * 16 / GROUP_OUTPUTS;
  auto load = [&](int row, int k, float(&v)[8]) {
    const long long place = ((long long)row * HEADS * DIM + group * GROUP_INPUTS + k) * 2;
    unpack_bf16(row < p.rows ? __ldcg((const uint4*)(p.mixed + place)) : make_uint4(0, 0, 0, 0), v);
  };
  Grouped::run(memory, s, p.spin_limit, p.error, load, [&](int tile, int n, int row, float x) {
    const float next = __shfl_down_sync(~0u, x, 1);
    if (row < p.rows && n % 2 == 0)
      *(u32*)(p.out + ((long long)row * GROUPS * GROUP_OUTPUTS + tile * 16 + n) * 2) = bf_pair(x, next);
  });
}
