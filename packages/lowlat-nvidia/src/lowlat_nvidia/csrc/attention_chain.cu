// The attention region of a DeepSeek-V4.1 layer for at most 8 rows, four kernels under programmatic dependent launch:
//   down_project   x -> wq_a and wkv
//   up_project     norm of the query latent, wq_b
//   attend         keys of this step; rotation of the queries as they are loaded, 128 window entries (FP8) and 512 chosen
//                  ones (FP4), sinks, inverse rotation, rounding to FP8
//   group_project  wo_a of each group of heads
// What a kernel makes for the next is words that are empty until they are published: a kernel that has started early polls
// them and does not wait for the end of the one before. All its blocks run by then, so that no wait is for ever: a
// kernel starts when every block of the one before it has let it.
// - down_project lets the others start when all that came before this chain is done: they may read the chain's inputs,
//   and what they share is as the chain before left it.
// - Words are emptied by another kernel: latents and queries by group_project, whose inputs came from all that read them;
//   mixed heads by up_project, before it publishes: group_project may start when all queries have come.
// - Every kernel waits for the one before it at its end, so that the end of the last is the end of all.
#include "chain_attend.cuh"
#include "chain_product.cuh"

static_assert(sizeof(AttendShared) <= ATTEND_SHARED, "shared memory");

DEV bool is_thread(int thread) { return threadIdx.x == thread; }

using Down = Product<HIDDEN / 4, 4>;
static_assert(sizeof(Down::Shared) <= DOWN_SHARED, "shared memory");
extern "C" __global__ void __cluster_dims__(4) __launch_bounds__(THREADS, 2) down_project(const Chain p) {
  Down::Shared& s = *(Down::Shared*)dynamic_shared();
  constexpr int INPUTS = HIDDEN / 4, CHUNKS = INPUTS / 8, PASSES = (CHUNKS * MAX_ROWS + THREADS - 1) / THREADS;
  const int thread = threadIdx.x, tile = blockIdx.x / 4, rank = cluster_rank(), chunks = p.rows * CHUNKS;
  stamp(p, 0, 0);
  Down::start(s, tile, rank, p.down, p.down_scales);
  if (p.rows <= FEW_ROWS && is_thread(32)) fetch_weights(p.up, HEADS * DIM * QUERY_LATENT);
  stamp(p, 0, 1);
  cluster_wait();
  wait_for_earlier_kernel();
  let_next_kernel_start();  // not before: what the others read must be older than this chain
  stamp(p, 0, 2);
  uint4 raw[PASSES];
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int at = i * THREADS + thread;
    raw[i] = make_uint4(0, 0, 0, 0);
    if (at < chunks)
      raw[i] = __ldcg((const uint4*)(p.x + ((at / CHUNKS) * HIDDEN + rank * INPUTS + at % CHUNKS * 8) * 2));
  }
#pragma unroll
  for (int i = 0; i < PASSES; i++) {
    const int at = i * THREADS + thread;
    if (at / 32 * 32 >= chunks) break;  // the whole warp
    float v[8];
    unpack_bf16(raw[i], v);
    Down::put(s, at / CHUNKS, at % CHUNKS, v);
  }
  shared_for_matrices();
  __syncthreads();
  stamp(p, 0, 3);
  float sum[4];
  Down::multiply(p, s, sum);
  stamp(p, 0, 4);
  Down::join_cluster(p, s, rank, sum, [&](int row, int output, u32 pair) {
    if (row < p.rows) store_exchange(p.latent + (row * LATENT + tile * TILE + output) * 2, pair);
  });
  stamp(p, 0, 5);
}

using Up = Product<QUERY_LATENT, 1>;
static_assert(sizeof(Up::Shared) <= UP_SHARED, "shared memory");
constexpr int ASIDE = 64;  // threads of warps that have no row where there are 6
// Thread i of all those: an entry on its way to the L2; words of mixed heads emptied, seen before this block publishes.
DEV void prepare_for_attention(const Chain& p, int i) {
  constexpr int DATA = HEADS * DIM / 16, SCALES = DATA / 8;
  static_assert(HEADS * DIM / TILE * ASIDE >= MAX_ROWS * (DATA + SCALES) && DATA + SCALES <= WINDOW + CHOSEN, "threads");
  const int row = i / (WINDOW + CHOSEN), place = i % (WINDOW + CHOSEN);
  if (row >= p.rows) return;
  const int entry = p.rows <= FEW_ROWS ? entry_of(p, row, place) : -1;
  const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  if (place < DATA) *(uint4*)(p.mixed + (row * DATA + place) * 16) = empty;
  else if (place < DATA + SCALES) *(uint4*)(p.mixed_scales + (row * SCALES + place - DATA) * 4) = empty;
  stores_before();
  if (entry >= 0) fetch_entry(p, entry, place < WINDOW);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) up_project(const Chain p) {
  Up::Shared& s = *(Up::Shared*)dynamic_shared();
  constexpr int CHUNKS = QUERY_LATENT / 256;  // of 8 inputs, of a lane; a warp has a row
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  stamp(p, 1, 0);
  let_next_kernel_start();
  Up::start(s, blockIdx.x, 0, p.up, p.up_scales);
  if (p.rows <= FEW_ROWS && is_thread(THREADS - 1)) fetch_weights(p.group, GROUPS * GROUP_OUTPUTS * GROUP_INPUTS);
  if (threadIdx.x >= THREADS - ASIDE) prepare_for_attention(p, (threadIdx.x - (THREADS - ASIDE)) * gridDim.x + blockIdx.x);
  stamp(p, 1, 1);
  if (row < p.rows) {
    uint4 raw[CHUNKS], norm[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) norm[i] = load_constant(p.query_norm + (i * 32 + lane) * 16);
    take(p, raw, [&](int i) { return p.latent + row * LATENT * 2 + (i * 32 + lane) * 16; });
    float square = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      float v[8];
      unpack_bf16(raw[i], v);
#pragma unroll
      for (int k = 0; k < 8; k++) square += v[k] * v[k];
    }
#pragma unroll
    for (int o = 16; o; o /= 2) square += __shfl_xor_sync(~0u, square, o);
    stamp(p, 1, 2);
    const float factor = rsqrtf(square / QUERY_LATENT + p.eps);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      float v[8], weight[8];
      unpack_bf16(raw[i], v);
      unpack_bf16(norm[i], weight);
#pragma unroll
      for (int k = 0; k < 8; k++) v[k] = bf_round(v[k] * factor * weight[k]);
      Up::put(s, row, i * 32 + lane, v);
    }
  }
  shared_for_matrices();
  __syncthreads();
  stamp(p, 1, 3);
  float sum[4];
  Up::multiply(p, s, sum);
  stamp(p, 1, 4);
  Up::join(s, sum, [&](int row, int output, u32 pair) {
    if (row < p.rows) store_exchange(p.query + (row * HEADS * DIM + blockIdx.x * TILE + output) * 2, pair);
  });
  stamp(p, 1, 5);
  wait_for_earlier_kernel();
}

extern "C" __global__ void __cluster_dims__(BLOCKS_A_ROW) __launch_bounds__(THREADS, 2) attend(const Chain p) {
  AttendShared& s = *(AttendShared*)dynamic_shared();
  attend_row(p, s, blockIdx.x / BLOCKS_A_ROW, blockIdx.x % BLOCKS_A_ROW);
  wait_for_earlier_kernel();
}

using Grouped = Product<GROUP_INPUTS / 4, 4>;
static_assert(sizeof(Grouped::Shared) <= GROUP_BESIDE_SHARED, "shared memory");
DEV void empty_words(const Chain& p) {
  constexpr int QUERY = HEADS * DIM * 2 / 16, KEY = LATENT * 2 / 16;
  const uint4 empty = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < p.rows * (QUERY + KEY); i += gridDim.x * THREADS)
    *(uint4*)(i < p.rows * QUERY ? p.query + i * 16 : p.latent + (i - p.rows * QUERY) * 16) = empty;
}
extern "C" __global__ void __cluster_dims__(4) __launch_bounds__(THREADS, 2) group_project(const Chain p) {
  Grouped::Shared& s = *(Grouped::Shared*)dynamic_shared();
  constexpr int INPUTS = GROUP_INPUTS / 4, PLACES = THREADS / MAX_ROWS, PASSES = INPUTS / 16 / PLACES;
  constexpr int SCALES = (INPUTS / GROUP + PLACES - 1) / PLACES, LAST = INPUTS / GROUP - 1;
  const int thread = threadIdx.x, tile = blockIdx.x / 4, rank = cluster_rank();
  const int first = tile * TILE / GROUP_OUTPUTS * GROUP_INPUTS + rank * INPUTS;  // of a row's inputs
  stamp(p, 3, 0);
  let_next_kernel_start();
  Grouped::start(s, tile, rank, p.group, p.group_scales);
  cluster_wait();
  stamp(p, 3, 1);
  const int row = thread % MAX_ROWS, place = thread / MAX_ROWS;
  if (row < p.rows) {
    uint4 raw[PASSES];
    u32 scales[SCALES];
    auto data_at = [&](int i) { return p.mixed + row * HEADS * DIM + first + (i * PLACES + place) * 16; };
    auto scale_at = [&](int i) { return p.mixed_scales + (row * HEADS * DIM + first) / GROUP + min(i * PLACES + place, LAST); };
#pragma unroll
    for (int i = 0; i < PASSES; i++) raw[i] = load_exchange(data_at(i));
#pragma unroll
    for (int i = 0; i < SCALES; i++) scales[i] = load_exchange_word(scale_at(i));
    until_there(p, [&] { return ask(raw, data_at) | ask(scales, scale_at); });
#pragma unroll
    for (int i = 0; i < PASSES; i++) *(uint4*)(s.rows + (i * PLACES + place) * 128 + row * 16) = raw[i];
#pragma unroll
    for (int i = 0; i < SCALES; i++)
      s.row_scales[min(i * PLACES + place, LAST)][row] = __uint_as_float(scales[i]);
  }
  shared_for_matrices();
  __syncthreads();
  stamp(p, 3, 2);
  empty_words(p);
  float sum[4];
  Grouped::multiply(p, s, sum);
  stamp(p, 3, 3);
  Grouped::join_cluster(p, s, rank, sum, [&](int row, int output, u32 pair) {
    if (row < p.rows) *(u32*)(p.out + (row * GROUPS * GROUP_OUTPUTS + tile * TILE + output) * 2) = pair;
  });
  stamp(p, 3, 4);
  wait_for_earlier_kernel();
}
