// Routed experts of a mixture for at most 8 rows: router, products (gate and up, then down), weighted sum. Three kernels
// under programmatic dependent launch. The products start while the router runs and need nothing from it but logits.
//
// One launch for all products, a block a multiprocessor. Weights come through a ring of pages, from the first tile of gate
// and up to the last of down, without regard to what is waited for meanwhile. Activations go to other blocks as words that
// carry the launch's tag, so blocks need no barrier between them. 16 warps multiply and wait for nothing but their next page;
// four more sum over them, publish, and fill pages again.
#include "experts_first.cuh"
#include "experts_second.cuh"

constexpr int ROUTER_EXPERTS = 4, ROUTER_THREADS = HIDDEN / 16, ROUTER_WARPS = ROUTER_THREADS / 32;
static_assert(ROUTER_THREADS % 32 == 0, "sizes");

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

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_products(const Params p) {
  Shared& s = *(Shared*)dynamic_shared();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  constexpr int WHOLE = PAGES + 2 * PLACES, TAKEN = WHOLE + BUFFERS, BARRIERS = TAKEN + BUFFERS;
  if (thread < BARRIERS) {
    barrier_init(shared_address(s.full + thread), thread >= WHOLE && thread < TAKEN ? WARPS : 1);
    barriers_ready();
  }
  Rows rows;
  if (!p.listed) fetch_rows(p, rows, warp, lane);  // the router has them, too: they come while it runs
  wait_for_earlier_kernel();
  choose(p, s.choice, s.scores);
  let_next_kernel_start();
  const Work work = share_work(s.choice.count);
  const u64 policy = read_once_policy();
  if (warp < PAGES / 2 && lane < PAGE_TILES) fill_page(p, s, work, warp, lane, policy);
  if (p.listed) fetch_rows(p, rows, warp, lane);  // after the weights are on their way
  const u32 epoch = s.choice.epoch;
  if (thread == 0) p.epochs[blockIdx.x] = epoch;
  if (blockIdx.x == 0 && !p.listed && warp < p.rows && lane < TOP) {
    p.chosen[warp * TOP + lane] = s.choice.chosen[warp][lane];
    p.weights[warp * TOP + lane] = s.choice.weights[warp][lane];
  }
  __syncwarp();
  const bool down = p.phases > 1 && work.second < work.second_end;
  const int first_slot = work.second / SECOND_TILES, slots = (work.second_end - 1) / SECOND_TILES - first_slot + 1;
  if (warp >= WARPS) {
    give_registers<64>();
    finish_first(p, s, work, warp - WARPS, lane, policy, epoch);
    if (down) named_arrive(2, THREADS);
    if (down && warp == WARPS) refill_second(p, s, work, lane, policy);
  } else {
    take_registers<104>();
    quantise_rows(rows, lane);
    multiply_first(p, s, rows, work, warp, lane);
    if (!down) return;
    take_activations(p, s, first_slot, slots, warp, lane, epoch);
    multiply_second(p, s, work, first_slot, warp, lane);
  }
}

// Sums in the order of the choices. Blocks are so small that they start beside those of the products, and wait there.
constexpr int SUM_THREADS = 128;
extern "C" __global__ void __launch_bounds__(SUM_THREADS) experts_sum(const Params p) {
  wait_for_earlier_kernel();
  const int i = blockIdx.x * SUM_THREADS + threadIdx.x, row = i / (HIDDEN / 4), n = i % (HIDDEN / 4);
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
