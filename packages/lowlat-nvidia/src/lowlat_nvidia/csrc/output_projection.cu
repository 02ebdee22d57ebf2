// A row-parallel projection whose finished tiles go to all ranks from its epilogue, and the kernel that takes them in:
// sum in rank order, rebuild of the four residual streams, collapse, norm.
//
// A word is two bfloat16 and the step's tag, stored at once into every rank's inbox (unicast stores): a consumer starts on
// a value as soon as its tag matches, so there are no flags and no separate sending. Two halves of the inbox alternate:
// a rank that is a step ahead cannot overwrite what another has not read, because it needs that one's words to go on.
#include "quantised.cuh"
#include "system.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int PROJECT_PAIRS = INPUTS / (64 * WARPS);  // pairs of groups of a warp
constexpr int TILE_OUTPUTS = 8, TILES = HIDDEN / TILE_OUTPUTS;
constexpr int TILE_BYTES = INPUTS * TILE_OUTPUTS;
constexpr int CONSUME_THREADS = HIDDEN / (4 * CLUSTER), STREAMS = 4;
static_assert(INPUTS % (64 * WARPS) == 0 && HIDDEN % (4 * CLUSTER * 32) == 0, "sizes");

struct Output {
  const u8* input;            // [rows][INPUTS] bfloat16, this rank's columns
  const u8* weights;          // packed, see comm/output_projection.py
  const float* block_scales;  // [HIDDEN / 32][INPUTS / 32]
  u64* inboxes[MAX_RANKS];    // of each rank: [2][rank][MAX_ROWS][HIDDEN / 2]
  u32* errors[MAX_RANKS];
  u32* epochs;                // [block]: launches so far of this kernel
  float* partial;             // [rows][HIDDEN], where tiles are not published; or null
  const float* summed;        // [rows][HIDDEN], where somebody else summed; or null
  const u8* streams;          // [rows][4][HIDDEN] bfloat16
  const float* post;          // [rows][4]
  const float* mix;           // [rows][4][4], from stream j to stream i
  const float* collapse;      // [rows][4]
  const u8* norm;             // [HIDDEN] bfloat16
  u8* new_streams;            // [rows][4][HIDDEN] bfloat16
  u8* out;                    // [rows][HIDDEN] bfloat16
  float* sum_out;             // [rows][HIDDEN]: an all-reduce alone stores here and ends; or null
  int rows, rank, ranks;
  float eps;
  u32 spin_limit;
};

// Kernels overlap, so that L1 may hold what an earlier launch saw.
DEV u32 next_epoch(const Output& p) { return __ldcg(p.epochs + blockIdx.x) + 1; }
DEV long long inbox_place(const Output& p, u32 epoch, int rank, int row, int pair) {
  return (((long long)(epoch % 2) * p.ranks + rank) * MAX_ROWS + row) * (HIDDEN / 2) + pair;
}
DEV void publish_pair(const Output& p, u32 epoch, int row, int pair, float low, float high) {
  const u64 word = (u64)epoch << 32 | bf_pair(low, high);
  const long long place = inbox_place(p, epoch, p.rank, row, pair);
  for (int r = 1; r <= p.ranks; r++) store_system(p.inboxes[(p.rank + r) % p.ranks] + place, word);  // far ones first
}
// Ends the launch on all ranks.
DEV void give_up(const Output& p, int stage) { tell_error(p.errors, p.rank, p.ranks, 1u + p.rank * 16 + stage, 0); }

DEV void add_group(float (&sum)[2], u32 w0, u32 w1, float scale, uint4 x) {
  u32 a0, a1, a2, a3;
  fp8_to_half(w0, a0, a1);
  fp8_to_half(w1, a2, a3);
  float d[4] = {0, 0, 0, 0};
  mma_half(d, a0, 0, a1, 0, x.x, x.y);
  mma_half(d, a2, 0, a3, 0, x.z, x.w);
  sum[0] += d[0] * scale;
  sum[1] += d[1] * scale;
}

struct ProjectShared {
  alignas(16) float parts[BLOCK_TILES][WARPS][MAX_ROWS * TILE_OUTPUTS];
  float units[WARPS][MAX_ROWS];
  float block_scales[BLOCK_TILES][INPUTS / GROUP];
  u64 barriers[BLOCK_TILES];
};

// One warp: sums of a tile over all warps, two outputs of a row a lane, to all ranks or as partial sums of this one.
DEV void finish_tile(const Output& p, const float (*parts)[MAX_ROWS * TILE_OUTPUTS], u32 epoch, int tile, int lane) {
  const int row = lane / 4, n = tile * TILE_OUTPUTS + lane % 4 * 2;
  float2 total = make_float2(0, 0);
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const float2 part = *(const float2*)(parts[w] + lane * 2);
    total.x += part.x, total.y += part.y;
  }
  if (row >= p.rows) return;
  if (p.partial)
    *(float2*)(p.partial + row * HIDDEN + n) = make_float2(bf_round(total.x), bf_round(total.y));
  else
    publish_pair(p, epoch, row, n / 2, total.x, total.y);
}

// A block has up to BLOCK_TILES tiles of 8 outputs. All its weights are on their way before the input is waited for. The
// warps split the inputs of a tile; which of them finishes it changes from tile to tile, and the others do not wait.
extern "C" __global__ void __launch_bounds__(THREADS) output_project(const Output p) {
  extern __shared__ __align__(128) u8 memory[];
  ProjectShared& s = *(ProjectShared*)(memory + BLOCK_TILES * TILE_BYTES);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int begin = TILES * blockIdx.x / gridDim.x, end = TILES * (blockIdx.x + 1) / gridDim.x;
  if (thread == 0) {
    for (int i = 0; i < BLOCK_TILES; i++) barrier_init(shared_address(&s.barriers[i]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const u64 policy = read_once_policy();
    for (int tile = begin; tile < end; tile++) {
      const u32 barrier = shared_address(&s.barriers[tile - begin]);
      barrier_expect(barrier, TILE_BYTES);
      copy_bulk(shared_address(memory) + (tile - begin) * TILE_BYTES, p.weights + (long long)tile * TILE_BYTES, TILE_BYTES,
                barrier, policy);
    }
  }
  for (int i = thread; i < (end - begin) * (INPUTS / GROUP); i += THREADS)
    s.block_scales[i / (INPUTS / GROUP)][i % (INPUTS / GROUP)] =
        p.block_scales[(begin + i / (INPUTS / GROUP)) / 4 * (INPUTS / GROUP) + i % (INPUTS / GROUP)];
  wait_for_earlier_kernel();
  let_next_kernel_start();
  const u32 epoch = next_epoch(p);
  uint4 x[PROJECT_PAIRS * 2];
  const u32 unit = quantise_share<PROJECT_PAIRS * 2>(x, [&](int i, float(&v)[8]) {
    uint4 w = make_uint4(0, 0, 0, 0);
    const long long place = (long long)(lane / 4) * INPUTS + (warp * PROJECT_PAIRS * 2 + i) * GROUP + lane % 4 * 8;
    if (lane / 4 < p.rows) w = __ldcg((const uint4*)(p.input + place * 2));
    unpack_bf16(w, v);
  });
  if (lane % 4 == 0) s.units[warp][lane / 4] = power_value(unit);
  __syncwarp();
  const float2 units = *(const float2*)&s.units[warp][lane % 4 * 2];
  __syncthreads();
  if (thread == 0) p.epochs[blockIdx.x] = epoch;
#pragma unroll 1
  for (int tile = begin; tile < end; tile++) {
    const int own = tile - begin, barrier = 1 + own % WARPS;
    u32 polls = 0;
    while (!barrier_done(shared_address(&s.barriers[own]), 0))
      if (++polls > p.spin_limit) {
        give_up(p, 1);
        break;
      }
    const u32 page = shared_address(memory) + own * TILE_BYTES + warp * PROJECT_PAIRS * 512 + lane * 16;
    const float* block = s.block_scales[own] + warp * PROJECT_PAIRS * 2;
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < PROJECT_PAIRS; i++) {
      const uint4 w = load_shared(page + i * 512);
      add_group(sum, w.x, w.y, block[2 * i], x[2 * i]);
      add_group(sum, w.z, w.w, block[2 * i + 1], x[2 * i + 1]);
    }
    float* to = s.parts[own][warp] + lane % 4 * 2 * TILE_OUTPUTS + lane / 4;
    to[0] = sum[0] * (units.x * FP8_TO_HALF);
    to[TILE_OUTPUTS] = sum[1] * (units.y * FP8_TO_HALF);
    if (warp == own % WARPS) {
      named_sync(barrier, THREADS);
      finish_tile(p, s.parts[own], epoch, tile, lane);
    } else {
      named_arrive(barrier, THREADS);
    }
    if (own % WARPS == WARPS - 1) __syncthreads();  // barriers come round again
  }
}

// The plain way of sending: a kernel of its own that reads the finished partial sums.
extern "C" __global__ void __launch_bounds__(CONSUME_THREADS) output_push(const Output p) {
  wait_for_earlier_kernel();
  __shared__ u32 epoch;
  if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch = next_epoch(p);
  __syncthreads();
  let_next_kernel_start();
  for (int i = blockIdx.x * CONSUME_THREADS + threadIdx.x; i < p.rows * HIDDEN / 2; i += gridDim.x * CONSUME_THREADS) {
    const float2 pair = __ldcg((const float2*)p.partial + i);
    publish_pair(p, epoch, i / (HIDDEN / 2), i % (HIDDEN / 2), pair.x, pair.y);
  }
}

// Adds a thread's two pairs of all ranks, in rank order; false: somebody gave up. All words are asked for at once.
DEV bool take(const Output& p, u32 epoch, int row, int pair, float (&out)[4]) {
  uint4 words[MAX_RANKS];  // of both pairs: value, tag
  const u64* inbox = p.inboxes[p.rank];
#pragma unroll
  for (int rank = 0; rank < MAX_RANKS; rank++)
    if (rank < p.ranks) words[rank] = load_system_words(inbox + inbox_place(p, epoch, rank, row, pair));
  u32 polls = 0;
#pragma unroll
  for (int rank = 0; rank < MAX_RANKS; rank++)
    if (rank < p.ranks) {
      while (words[rank].y != epoch || words[rank].w != epoch) {
        if (++polls % 256 == 0 && (polls > p.spin_limit || load_system_word(p.errors[p.rank]))) return false;
        words[rank] = load_system_words(inbox + inbox_place(p, epoch, rank, row, pair));
      }
      out[0] += bf_low(words[rank].x), out[1] += bf_high(words[rank].x);
      out[2] += bf_low(words[rank].z), out[3] += bf_high(words[rank].z);
    }
  return true;
}
DEV float sum_over_cluster(float x, float* mine, float* across) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int o = 16; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  if (lane == 0) mine[warp] = x;
  __syncthreads();
  float block = 0;
  for (int i = 0; i < CONSUME_THREADS / 32; i++) block += mine[i];
  u32 self;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(self));
  if (threadIdx.x < CLUSTER) {  // to the same place in every block of the cluster
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(across + self)), "r"(threadIdx.x));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(block) : "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  float total = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) total += across[i];
  return total;
}

// A cluster a row, a thread four outputs: 2 pairs. What does not come from the projection is loaded first.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(CONSUME_THREADS) output_consume(const Output p) {
  __shared__ float mine[CONSUME_THREADS / 32], across[CLUSTER];
  __shared__ u32 epoch;
  const int thread = threadIdx.x, row = blockIdx.x / CLUSTER;
  const int n = (blockIdx.x % CLUSTER * CONSUME_THREADS + thread) * 4;
  if (p.summed || p.partial) wait_for_earlier_kernel();  // else tags say what has come
  let_next_kernel_start();
  if (thread == 0 && !p.summed) p.epochs[blockIdx.x] = epoch = next_epoch(p);
  __syncthreads();
  if (row >= p.rows) {  // launched for all rows that there can be, so that every block counts every launch
    wait_for_earlier_kernel();
    return;
  }
  uint2 streams[STREAMS];
  float post[STREAMS], mix[STREAMS][STREAMS], collapse[STREAMS];
  uint2 norm = make_uint2(0, 0);
  if (!p.sum_out) {
#pragma unroll
    for (int j = 0; j < STREAMS; j++) {
      streams[j] = *(const uint2*)(p.streams + (((long long)row * STREAMS + j) * HIDDEN + n) * 2);
      post[j] = p.post[row * STREAMS + j];
      collapse[j] = p.collapse[row * STREAMS + j];
#pragma unroll
      for (int i = 0; i < STREAMS; i++) mix[j][i] = p.mix[(row * STREAMS + j) * STREAMS + i];
    }
    norm = *(const uint2*)(p.norm + n * 2);
  }
  float out[4] = {0, 0, 0, 0};
  if (p.summed) {
    const float4 v = __ldcg((const float4*)(p.summed + (long long)row * HIDDEN + n));
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else {
    if (!take(p, epoch, row, n / 2, out)) give_up(p, 2);
  }
  if (p.sum_out) {
    *(float4*)(p.sum_out + (long long)row * HIDDEN + n) = make_float4(out[0], out[1], out[2], out[3]);
    wait_for_earlier_kernel();
    return;
  }
  float y[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < STREAMS; i++) {
    float z[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      z[c] = post[i] * out[c];
#pragma unroll
      for (int j = 0; j < STREAMS; j++) {
        const u32 word = c < 2 ? streams[j].x : streams[j].y;
        z[c] += mix[j][i] * (c % 2 ? bf_high(word) : bf_low(word));
      }
      z[c] = bf_round(z[c]);
      y[c] += collapse[i] * z[c];
    }
    *(uint2*)(p.new_streams + (((long long)row * STREAMS + i) * HIDDEN + n) * 2) =
        make_uint2(bf_pair(z[0], z[1]), bf_pair(z[2], z[3]));
  }
  float square = 0;
#pragma unroll
  for (int c = 0; c < 4; c++) y[c] = bf_round(y[c]), square += y[c] * y[c];
  const float factor = rsqrtf(sum_over_cluster(square, mine, across) / HIDDEN + p.eps);
  *(uint2*)(p.out + ((long long)row * HIDDEN + n) * 2) =
      make_uint2(bf_pair(y[0] * factor * bf_low(norm.x), y[1] * factor * bf_high(norm.x)),
                 bf_pair(y[2] * factor * bf_low(norm.y), y[3] * factor * bf_high(norm.y)));
  wait_for_earlier_kernel();  // so that what comes after this kernel comes after the projection too
}
