// Routed experts of a mixture for at most 8 rows: router, first products (gate and up), second (down), weighted sum.
// Four kernels under programmatic dependent launch. The first products start while the router runs and need nothing
// from it but logits; the second fill their rings with weights before the first are done.
#include "experts.cuh"

constexpr int ROUTER_EXPERTS = 4, ROUTER_THREADS = HIDDEN / 16, ROUTER_WARPS = ROUTER_THREADS / 32;
constexpr int TEAM = 8, TEAMS = WARPS / TEAM;  // warps that share a tile of the first products, and split its inputs
constexpr int FIRST_PAIRS = HIDDEN / (64 * TEAM), FIRST_TILES = INNER / 8;  // pairs of a warp; tiles of 8 activations
constexpr int FIRST_CHUNKS = FIRST_PAIRS / FIRST_CHUNK;
constexpr int SECOND_PAIRS = INNER / 64, SECOND_TILES = HIDDEN / 16;
constexpr int SECOND_CHUNKS = SECOND_PAIRS / SECOND_CHUNK;
static_assert(HIDDEN % (64 * TEAM) == 0 && INNER % 64 == 0 && ROUTER_THREADS % 32 == 0, "sizes");
static_assert(FIRST_PAIRS % FIRST_CHUNK == 0 && SECOND_PAIRS % SECOND_CHUNK == 0, "chunks");

extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) expert_router(const Params p) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  wait_for_earlier_kernel();
  let_next_kernel_start();  // the rows are there: what comes next prepares them meanwhile
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
  alignas(16) uint4 rows[HIDDEN / GROUP][32];
  float parts[TEAMS][2][TEAM][16 * MAX_ROWS];
  u32 most[WARPS][MAX_ROWS];
  float units[MAX_ROWS];
  Choice choice;
  u64 barriers[WARPS][FIRST_DEPTH];
};
DEV void init_barriers(u64* barriers, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i++) barrier_init(shared_address(barriers + i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
}
// All threads: groups of rows that load(group, x) gives, into shared memory as the matrix instructions take them.
template <int GROUPS, class Load>
DEV void quantise_rows(uint4 (*rows)[32], u32 (*most)[MAX_ROWS], float* units, Load load) {
  constexpr int EACH = (GROUPS + WARPS - 1) / WARPS;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  uint4 x[EACH];
  u32 powers[EACH], unit = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (warp + i * WARPS < GROUPS) {
      float v[8];
      load(warp + i * WARPS, v);
      powers[i] = group_power(group_largest(v));
      x[i] = rounded_half(v, powers[i]);
      unit = max(unit, powers[i]);
    }
  if (lane % 4 == 0) most[warp][lane / 4] = unit;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) unit = max(unit, most[w][lane / 4]);
#pragma unroll
  for (int i = 0; i < EACH; i++)
    if (warp + i * WARPS < GROUPS) rows[warp + i * WARPS][lane] = in_units(x[i], powers[i], unit);
  if (warp == 0 && lane % 4 == 0) units[lane / 4] = power_value(unit);
  __syncthreads();
}
// Sums a tile over the warps of a team, applies the activation: 8 rows x 8 values by 64 threads.
DEV void activate(const Params& p, const float (*part)[16 * MAX_ROWS], int thread, int slot, int tile, float unit) {
  const int row = thread / 8, j = thread % 8;
  float gate = 0, up = 0;
#pragma unroll
  for (int w = 0; w < TEAM; w++) gate += part[w][j * MAX_ROWS + row], up += part[w][(j + 8) * MAX_ROWS + row];
  gate = fminf(gate * (FP4_TO_HALF * unit), LIMIT);
  up = fminf(fmaxf(up * (FP4_TO_HALF * unit), -LIMIT), LIMIT);
  p.inner[((long long)slot * MAX_ROWS + row) * INNER + tile * 8 + j] = gate / (1.f + expf(-gate)) * up;
}

// A team takes tiles of 8 gates and 8 ups; its warps split the inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_first(const Params p) {
  extern __shared__ __align__(128) u8 memory[];
  FirstShared& s = *(FirstShared*)memory;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, team = warp / TEAM, part = warp % TEAM;
  init_barriers(&s.barriers[0][0], WARPS * FIRST_DEPTH);
  quantise_rows<HIDDEN / GROUP>(s.rows, s.most, s.units, [&](int group, float(&x)[8]) {  // the router saw the rows, too
    const int row = lane / 4;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < p.rows) v = *(const uint4*)(p.hidden + ((long long)row * HIDDEN + group * GROUP + lane % 4 * 8) * 2);
    unpack_bf16(v, x);
  });
  wait_for_earlier_kernel();
  choose(p, s.choice);
  let_next_kernel_start();
  const int count = s.choice.count * FIRST_TILES, self = blockIdx.x * TEAMS + team, teams = gridDim.x * TEAMS;
  const int begin = (int)((long long)count * self / teams), end = (int)((long long)count * (self + 1) / teams);
  const int* experts = s.choice.experts;
  auto place = [&](int item) {
    const long long tile = (long long)experts[item / FIRST_TILES] * FIRST_TILES + item % FIRST_TILES;
    return p.first + (tile * TEAM + part) * (FIRST_PAIRS * PAIR_ALL);
  };
  Ring<FIRST_CHUNK, FIRST_CHUNKS, FIRST_DEPTH> ring(
      shared_address(memory + FIRST_RING) + warp * FIRST_DEPTH * FIRST_CHUNK * PAIR_ALL,
      shared_address(s.barriers[warp]), begin, end);
  ring.start(lane, place);
  if (blockIdx.x == 0 && !p.listed && warp < p.rows && lane < TOP) {
    p.chosen[warp * TOP + lane] = s.choice.chosen[warp][lane];
    p.weights[warp * TOP + lane] = s.choice.weights[warp][lane];
  }
  const u32 rows = shared_address(s.rows[part * FIRST_PAIRS * 2]);
#pragma unroll 1
  for (int item = begin; item < end; item++) {
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < FIRST_CHUNKS; c++) {
      if (!ring.wait(p.spin_limit)) *p.error = 1;
      multiply_chunk<FIRST_CHUNK>(sum, ring, rows + c * FIRST_CHUNK * 1024, lane, p.zero, place);
    }
    float* to = s.parts[team][item % 2][part] + lane / 4 * MAX_ROWS + lane % 4 * 2;
    *(float2*)to = make_float2(sum[0], sum[1]);
    *(float2*)(to + 8 * MAX_ROWS) = make_float2(sum[2], sum[3]);
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM * 32) : "memory");
    const int mine = thread - team * TEAM * 32;
    if (mine < 64) activate(p, s.parts[team][item % 2], mine, item / FIRST_TILES, item % FIRST_TILES, s.units[mine / 8]);
  }
}

// Outputs of a block come from at most two experts.
struct SecondShared {
  alignas(16) uint4 rows[2][SECOND_PAIRS * 2][32];
  u32 most[WARPS][MAX_ROWS];
  float units[2][MAX_ROWS];
  Choice choice;
  u64 barriers[WARPS][SECOND_DEPTH];
};
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
// A warp takes tiles of 16 outputs over all inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_second(const Params p) {
  extern __shared__ __align__(128) u8 memory[];
  SecondShared& s = *(SecondShared*)memory;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  init_barriers(&s.barriers[0][0], WARPS * SECOND_DEPTH);
  choose(p, s.choice);  // the router was done before this kernel could start
  const long long count = (long long)s.choice.count * SECOND_TILES, warps = gridDim.x * WARPS;
  const int self = blockIdx.x * WARPS + warp;
  const int begin = (int)(count * self / warps), end = (int)(count * (self + 1) / warps);
  const int block_begin = (int)(count * blockIdx.x / gridDim.x), block_end = (int)(count * (blockIdx.x + 1) / gridDim.x);
  auto place = [&](int item) {
    const long long tile = (long long)s.choice.experts[item / SECOND_TILES] * SECOND_TILES + item % SECOND_TILES;
    return p.second + tile * (SECOND_PAIRS * PAIR_ALL);
  };
  Ring<SECOND_CHUNK, SECOND_CHUNKS, SECOND_DEPTH> ring(
      shared_address(memory + SECOND_RING) + warp * SECOND_DEPTH * SECOND_CHUNK * PAIR_ALL,
      shared_address(s.barriers[warp]), begin, end);
  ring.start(lane, place);
  wait_for_earlier_kernel();
  let_next_kernel_start();
  const int first_slot = block_begin / SECOND_TILES;
  const int slots = block_begin < block_end ? (block_end - 1) / SECOND_TILES - first_slot + 1 : 0;
  for (int i = 0; i < slots; i++)
    quantise_rows<SECOND_PAIRS * 2>(s.rows[i], s.most, s.units[i], [&](int group, float(&x)[8]) {
      const long long row = (long long)(first_slot + i) * MAX_ROWS + lane / 4;
      const float4* from = (const float4*)(p.inner + row * INNER + group * GROUP + lane % 4 * 8);
      const float4 a = __ldcg(from), b = __ldcg(from + 1);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    });
  int slot = -1, goes[2] = {-1, -1};
#pragma unroll 1
  for (int item = begin; item < end; item++) {
    if (item / SECOND_TILES != slot) {
      slot = item / SECOND_TILES;
      find_places(p, s.choice, s.choice.experts[slot], lane, goes);
    }
    const int which = slot - first_slot;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < SECOND_CHUNKS; c++) {
      if (!ring.wait(p.spin_limit)) *p.error = 2;
      multiply_chunk<SECOND_CHUNK>(sum, ring, shared_address(s.rows[which][c * SECOND_CHUNK * 2]), lane, p.zero, place);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (goes[i] >= 0) {
        float* to = p.parts + (long long)goes[i] * HIDDEN + item % SECOND_TILES * 16 + lane / 4;
        const float unit = FP4_TO_HALF * s.units[which][lane % 4 * 2 + i];
        to[0] = sum[i] * unit;
        to[8] = sum[i + 2] * unit;
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
    const float w = __ldcg(p.weights + row * TOP + k);
    const float4 y = __ldcg((const float4*)(p.parts + (long long)(row * TOP + k) * HIDDEN) + n);
    sum.x += w * y.x, sum.y += w * y.y, sum.z += w * y.z, sum.w += w * y.w;
  }
  ((float4*)p.out)[i] = sum;
}
