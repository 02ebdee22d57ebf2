// Routed experts of a mixture for at most 8 rows: router, first products (gate and up), second (down), weighted sum.
// Four kernels under programmatic dependent launch. The first products start while the router runs and need nothing
// from it but logits; the second fill their rings with weights before the first are done.
#include "experts.cuh"

constexpr int ROUTER_EXPERTS = 4, ROUTER_THREADS = HIDDEN / 16, ROUTER_WARPS = ROUTER_THREADS / 32;
constexpr int ROUTER_BLOCKS = EXPERTS / ROUTER_EXPERTS;
constexpr int FIRST_PAIRS = HIDDEN / (64 * WARPS), FIRST_TILES = INNER / 8;    // pairs of a warp; tiles of 8 activations
constexpr int FIRST_CHUNKS = FIRST_PAIRS / FIRST_CHUNK;
constexpr int SECOND_PAIRS = INNER / 64, SECOND_TILES = HIDDEN / 16;
constexpr int SECOND_CHUNKS = SECOND_PAIRS / SECOND_CHUNK;
static_assert(HIDDEN % (64 * WARPS) == 0 && INNER % 64 == 0 && ROUTER_THREADS % 32 == 0, "sizes");
static_assert(FIRST_PAIRS % FIRST_CHUNK == 0 && SECOND_PAIRS % SECOND_CHUNK == 0, "chunks");

DEV void quantise_hidden(const Params& p, int from, int step) {
  const int lane = threadIdx.x % 32;
  for (int i = from; i < MAX_ROWS * HIDDEN / GROUP; i += step) {
    const int row = i / (HIDDEN / GROUP), group = i % (HIDDEN / GROUP), place = row * HIDDEN + group * GROUP + lane;
    const float x = row < p.rows ? __uint_as_float((u32)((const unsigned short*)p.hidden)[place] << 16) : 0.f;
    const float scale = group_scale(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(x)))));
    p.quantised[place] = (u8)to_fp8(__fdiv_rn(x, scale), 0.f, 0.f, 0.f);
    if (lane == 0) p.scales[group * MAX_ROWS + row] = scale;
  }
}

// Blocks beyond ROUTER_BLOCKS quantise the rows.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) expert_router(const Params p) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  let_next_kernel_start();
  wait_for_earlier_kernel();
  if (blockIdx.x >= ROUTER_BLOCKS) {
    const int warps = (gridDim.x - ROUTER_BLOCKS) * ROUTER_WARPS;
    quantise_hidden(p, (blockIdx.x - ROUTER_BLOCKS) * ROUTER_WARPS + warp, warps);
    return;
  }
  uint4 w[ROUTER_EXPERTS][2];
  const int expert = blockIdx.x * ROUTER_EXPERTS;
#pragma unroll
  for (int e = 0; e < ROUTER_EXPERTS; e++)
#pragma unroll
    for (int c = 0; c < 2; c++)
      w[e][c] = load_stream(p.gate + ((long long)(expert + e) * HIDDEN + (c * ROUTER_THREADS + thread) * 8) * 2);
  __shared__ float part[ROUTER_WARPS][ROUTER_EXPERTS * MAX_ROWS];
#pragma unroll 1
  for (int row = 0; row < p.rows; row++) {
    float sum[ROUTER_EXPERTS] = {};
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint4 x = *(const uint4*)(p.hidden + ((long long)row * HIDDEN + (c * ROUTER_THREADS + thread) * 8) * 2);
#pragma unroll
      for (int e = 0; e < ROUTER_EXPERTS; e++) {
        const u32* a = (const u32*)&w[e][c];
        const u32* b = (const u32*)&x;
#pragma unroll
        for (int i = 0; i < 4; i++) sum[e] += bf_low(a[i]) * bf_low(b[i]) + bf_high(a[i]) * bf_high(b[i]);
      }
    }
#pragma unroll
    for (int e = 0; e < ROUTER_EXPERTS; e++) {
#pragma unroll
      for (int o = 16; o; o /= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], o);
      if (lane == 0) part[warp][row * ROUTER_EXPERTS + e] = sum[e];
    }
  }
  __syncthreads();
  if (thread < p.rows * ROUTER_EXPERTS) {
    float sum = 0;
    for (int i = 0; i < ROUTER_WARPS; i++) sum += part[i][thread];
    p.logits[thread / ROUTER_EXPERTS * EXPERTS + expert + thread % ROUTER_EXPERTS] = sum;
  }
}

struct FirstShared {
  Choice choice;
  alignas(16) float parts[2][WARPS][16 * MAX_ROWS];
  alignas(16) float scales[WARPS][FIRST_PAIRS * 2][MAX_ROWS];
  u64 barriers[WARPS][FIRST_DEPTH];
};
DEV void init_barriers(u64* barriers, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i++) barrier_init(shared_address(barriers + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}
// Sums a tile over the warps, applies the activation: 8 rows x 8 values by 64 threads.
DEV void activate(const Params& p, const float (*part)[16 * MAX_ROWS], int slot, int tile) {
  if (threadIdx.x >= 64) return;
  const int row = threadIdx.x / 8, j = threadIdx.x % 8;
  float gate = 0, up = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) gate += part[w][j * MAX_ROWS + row], up += part[w][(j + 8) * MAX_ROWS + row];
  gate = fminf(gate * FP4_TO_FP8, LIMIT);
  up = fminf(fmaxf(up * FP4_TO_FP8, -LIMIT), LIMIT);
  p.inner[((long long)slot * MAX_ROWS + row) * INNER + tile * 8 + j] = gate / (1.f + expf(-gate)) * up;
}

// A block takes tiles of 8 gates and 8 ups; its warps split the inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_first(const Params p) {
  extern __shared__ __align__(128) u8 memory[];
  FirstShared& s = *(FirstShared*)(memory + WARPS * FIRST_DEPTH * FIRST_CHUNK * PAIR_ALL);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  init_barriers(&s.barriers[0][0], WARPS * FIRST_DEPTH);
  wait_for_earlier_kernel();
  choose(p, s.choice);
  let_next_kernel_start();
  const int count = s.choice.count * FIRST_TILES;
  const int begin = (int)((long long)count * blockIdx.x / gridDim.x);
  const int end = (int)((long long)count * (blockIdx.x + 1) / gridDim.x);
  const int* experts = s.choice.experts;
  auto address = [&](int chunk) {
    const int item = begin + chunk / FIRST_CHUNKS;
    const long long tile = (long long)experts[item / FIRST_TILES] * FIRST_TILES + item % FIRST_TILES;
    return p.first + ((tile * WARPS + warp) * FIRST_CHUNKS + chunk % FIRST_CHUNKS) * (FIRST_CHUNK * PAIR_ALL);
  };
  Ring<FIRST_CHUNK, FIRST_DEPTH> ring;
  ring.start(shared_address(memory) + warp * FIRST_DEPTH * FIRST_CHUNK * PAIR_ALL, shared_address(s.barriers[warp]),
             (end - begin) * FIRST_CHUNKS, lane, address);
  if (blockIdx.x == 0 && !p.listed && warp < p.rows && lane < TOP) {
    p.chosen[warp * TOP + lane] = s.choice.chosen[warp][lane];
    p.weights[warp * TOP + lane] = s.choice.weights[warp][lane];
  }
  uint2 x[FIRST_PAIRS * 2];
#pragma unroll
  for (int i = 0; i < FIRST_PAIRS * 2; i++)
    x[i] = *(const uint2*)(p.quantised + lane / 4 * HIDDEN + (warp * FIRST_PAIRS * 2 + i) * GROUP + lane % 4 * 8);
  for (int i = lane; i < FIRST_PAIRS * 2 * MAX_ROWS; i += 32)
    s.scales[warp][i / MAX_ROWS][i % MAX_ROWS] = p.scales[warp * FIRST_PAIRS * 2 * MAX_ROWS + i];
  __syncwarp();
#pragma unroll 1
  for (int item = begin; item < end; item++) {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < FIRST_CHUNKS; c++) {
      if (!ring.wait(p.spin_limit)) *p.error = 1;
      const int base = c * FIRST_CHUNK * 2;
      multiply_chunk<FIRST_CHUNK>(
          sum, ring.page(), lane, [&](int i) { return x[base + i]; },
          [&](int i) { return *(const float2*)&s.scales[warp][base + i][lane % 4 * 2]; });
      ring.release(lane, address);
    }
    float* part = s.parts[item % 2][warp] + lane / 4 * MAX_ROWS + lane % 4 * 2;
    *(float2*)part = make_float2(sum[0], sum[1]);
    *(float2*)(part + 8 * MAX_ROWS) = make_float2(sum[2], sum[3]);
    __syncthreads();
    activate(p, s.parts[item % 2], item / FIRST_TILES, item % FIRST_TILES);
  }
}

struct SecondShared {
  Choice choice;
  alignas(16) float scales[WARPS][SECOND_PAIRS * 2][MAX_ROWS];
  u64 barriers[WARPS][SECOND_DEPTH];
};
// The first products' activations of one expert as FP8: of row g, and the scales of all rows by way of shared memory.
DEV void quantise_inner(const Params& p, int slot, int lane, uint2 (&x)[SECOND_PAIRS * 2], float (*scales)[MAX_ROWS]) {
  const int g = lane / 4, q = lane % 4;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < SECOND_PAIRS * 2; i++) {
    const float4* from = (const float4*)(p.inner + ((long long)slot * MAX_ROWS + g) * INNER + i * GROUP + q * 8);
    const float4 a = from[0], b = from[1];
    float largest = fmaxf(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(a.z), fabsf(a.w))),
                          fmaxf(fmaxf(fabsf(b.x), fabsf(b.y)), fmaxf(fabsf(b.z), fabsf(b.w))));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float scale = group_scale(largest), inverse = 1.f / scale;  // exact: a power of two
    x[i] = make_uint2(to_fp8(a.x * inverse, a.y * inverse, a.z * inverse, a.w * inverse),
                      to_fp8(b.x * inverse, b.y * inverse, b.z * inverse, b.w * inverse));
    if (q == 0) scales[i][g] = scale;
  }
  __syncwarp();
}
// A warp takes tiles of 16 outputs over all inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_second(const Params p) {
  extern __shared__ __align__(128) u8 memory[];
  SecondShared& s = *(SecondShared*)(memory + WARPS * SECOND_DEPTH * SECOND_CHUNK * PAIR_ALL);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  init_barriers(&s.barriers[0][0], WARPS * SECOND_DEPTH);
  choose(p, s.choice);  // the router was done before this kernel could start
  const long long count = (long long)s.choice.count * SECOND_TILES, warps = gridDim.x * WARPS;
  const int self = blockIdx.x * WARPS + warp;
  const int begin = (int)(count * self / warps), end = (int)(count * (self + 1) / warps);
  auto address = [&](int chunk) {
    const int item = begin + chunk / SECOND_CHUNKS;
    const long long tile = (long long)s.choice.experts[item / SECOND_TILES] * SECOND_TILES + item % SECOND_TILES;
    return p.second + (tile * SECOND_CHUNKS + chunk % SECOND_CHUNKS) * (SECOND_CHUNK * PAIR_ALL);
  };
  Ring<SECOND_CHUNK, SECOND_DEPTH> ring;
  ring.start(shared_address(memory) + warp * SECOND_DEPTH * SECOND_CHUNK * PAIR_ALL, shared_address(s.barriers[warp]),
             (end - begin) * SECOND_CHUNKS, lane, address);
  wait_for_earlier_kernel();
  let_next_kernel_start();
  uint2 x[SECOND_PAIRS * 2];
  int slot = -1, place[2] = {-1, -1};
#pragma unroll 1
  for (int item = begin; item < end; item++) {
    if (item / SECOND_TILES != slot) {
      slot = item / SECOND_TILES;
      quantise_inner(p, slot, lane, x, s.scales[warp]);
      const int expert = s.choice.experts[slot];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int row = lane % 4 * 2 + i;
        place[i] = -1;
        if (row < p.rows)
          for (int k = 0; k < TOP; k++)
            if (s.choice.chosen[row][k] == expert) place[i] = row * TOP + k;
      }
    }
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < SECOND_CHUNKS; c++) {
      if (!ring.wait(p.spin_limit)) *p.error = 2;
      const int base = c * SECOND_CHUNK * 2;
      multiply_chunk<SECOND_CHUNK>(
          sum, ring.page(), lane, [&](int i) { return x[base + i]; },
          [&](int i) { return *(const float2*)&s.scales[warp][base + i][lane % 4 * 2]; });
      ring.release(lane, address);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (place[i] >= 0) {
        float* to = p.parts + (long long)place[i] * HIDDEN + item % SECOND_TILES * 16 + lane / 4;
        to[0] = sum[i] * FP4_TO_FP8;
        to[8] = sum[i + 2] * FP4_TO_FP8;
      }
  }
}

// Sums in the order of the choices.
extern "C" __global__ void __launch_bounds__(THREADS) experts_sum(const Params p) {
  wait_for_earlier_kernel();
  const int i = blockIdx.x * THREADS + threadIdx.x, row = i / (HIDDEN / 4), n = i % (HIDDEN / 4);
  if (row >= p.rows) return;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int k = 0; k < TOP; k++) {
    const float w = p.weights[row * TOP + k];
    const float4 y = ((const float4*)(p.parts + (long long)(row * TOP + k) * HIDDEN))[n];
    sum.x += w * y.x, sum.y += w * y.y, sum.z += w * y.z, sum.w += w * y.w;
  }
  ((float4*)p.out)[i] = sum;
}
