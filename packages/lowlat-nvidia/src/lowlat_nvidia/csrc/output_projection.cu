// A row-parallel projection whose finished tiles go to all ranks from its epilogue, and the kernel that takes them in:
// sum in rank order, rebuild of the four residual streams, collapse, norm.
//
// A word is two bfloat16 and the step's tag, stored at once into every rank's inbox (unicast stores): a consumer starts on
// a value as soon as its tag matches, so there are no flags and no separate sending. Two halves of the inbox alternate:
// a rank that is a step ahead cannot overwrite what another has not read, because it needs that one's words to go on.
#include "quantised.cuh"
#include "system.cuh"

constexpr int FINISHERS = 4, THREADS = 32 * (WARPS + FINISHERS);  // WARPS multiply, the others sum and publish
constexpr int MAX_RANKS = 8;  // of which there are RANKS
constexpr int PROJECT_PAIRS = INPUTS / (64 * WARPS);  // pairs of groups of a warp
constexpr int TILE_OUTPUTS = 8, TILES = HIDDEN / TILE_OUTPUTS;
constexpr int TILE_BYTES = INPUTS * TILE_OUTPUTS;
constexpr int CONSUME_THREADS = HIDDEN / (4 * CLUSTER), CONSUME_WARPS = CONSUME_THREADS / 32, STREAMS = 4;
static_assert(INPUTS % (64 * WARPS) == 0 && HIDDEN % (4 * CLUSTER * 32) == 0 && CLUSTER == 4, "sizes");

struct Params {
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
  int rows, rank;
  float eps;
  u32 spin_limit;
};

// Kernels overlap, so that L1 may hold what an earlier launch saw.
DEV u32 next_epoch(const Params& p) { return __ldcg(p.epochs + blockIdx.x) + 1; }
DEV long long inbox_place(const Params& p, u32 epoch, int rank, int row, int pair) {
  return (((long long)(epoch % 2) * RANKS + rank) * MAX_ROWS + row) * (HIDDEN / 2) + pair;
}
DEV void publish_pair(const Params& p, u32 epoch, int row, int pair, float low, float high) {
  const u64 word = (u64)epoch << 32 | bf_pair(low, high);
  const long long place = inbox_place(p, epoch, p.rank, row, pair);
#pragma unroll
  for (int i = 1; i <= RANKS; i++) {  // far ones first
    const int r = p.rank + i;
    store_system(p.inboxes[r < RANKS ? r : r - RANKS] + place, word);
  }
}
// Ends the launch on all ranks.
DEV void give_up(const Params& p, int stage) { tell_error(p.errors, p.rank, RANKS, 1u + p.rank * 16 + stage, 0); }

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
  alignas(16) float block_scales[BLOCK_TILES][INPUTS / GROUP];
  u64 there[BLOCK_TILES], whole[BLOCK_TILES];  // barriers: weights of a tile, its sums of all warps
  u32 epoch;
};
static_assert(BLOCK_TILES * TILE_BYTES + sizeof(ProjectShared) <= SHARED_BYTES, "shared memory");
DEV void wait_for(const Params& p, u64* barrier) {
  u32 polls = 0;
  while (!barrier_done(shared_address(barrier), 0))
    if (++polls > p.spin_limit) {
      give_up(p, 1);
      break;
    }
}

// One warp: sums of a tile over all warps, two outputs of a row a lane, to all ranks or as partial sums of this one.
DEV void finish_tile(const Params& p, const float (*parts)[MAX_ROWS * TILE_OUTPUTS], u32 epoch, int tile, int lane) {
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
// The finishers take turns.
DEV void finish_tiles(const Params& p, ProjectShared& s, int begin, int end, int turn, int lane) {
  if (turn == 0 && lane == 0) p.epochs[blockIdx.x] = s.epoch = next_epoch(p);
  named_sync(1, 32 * FINISHERS);
  const u32 epoch = s.epoch;
#pragma unroll 1
  for (int own = turn; begin + own < end; own += FINISHERS) {
    wait_for(p, &s.whole[own]);
    finish_tile(p, s.parts[own], epoch, begin + own, lane);
  }
}

// A block has up to BLOCK_TILES tiles of 8 outputs. All its weights are on their way before the input is waited for. The
// warps split the inputs of a tile and do not wait for each other: others finish it. Registers are left for the consumer,
// which starts beside it.
extern "C" __global__ void __maxnreg__(INPUTS > 2048 ? 64 : 56) output_project(const Params p) {
  u8* memory = dynamic_shared();
  ProjectShared& s = *(ProjectShared*)(memory + BLOCK_TILES * TILE_BYTES);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int begin = TILES * blockIdx.x / gridDim.x, end = TILES * (blockIdx.x + 1) / gridDim.x;
  if (thread == 0) {
    for (int i = 0; i < BLOCK_TILES; i++)
      barrier_init(shared_address(&s.there[i]), 1), barrier_init(shared_address(&s.whole[i]), WARPS);
    barriers_ready();
    const u64 policy = read_once_policy();
    for (int tile = begin; tile < end; tile++) {
      const u32 barrier = shared_address(&s.there[tile - begin]);
      barrier_expect(barrier, TILE_BYTES);
      copy_bulk(shared_address(memory) + (tile - begin) * TILE_BYTES, p.weights + (long long)tile * TILE_BYTES, TILE_BYTES,
                barrier, policy);
    }
  }
  for (int i = thread; i < (end - begin) * (INPUTS / GROUP); i += THREADS)
    s.block_scales[i / (INPUTS / GROUP)][i % (INPUTS / GROUP)] =
        p.block_scales[(begin + i / (INPUTS / GROUP)) / 4 * (INPUTS / GROUP) + i % (INPUTS / GROUP)];
  __syncthreads();
  wait_for_earlier_kernel();
  let_next_kernel_start();
  if (warp >= WARPS) return finish_tiles(p, s, begin, end, warp - WARPS, lane);
  uint4 x[PROJECT_PAIRS * 2];
#pragma unroll
  for (int i = 0; i < PROJECT_PAIRS * 2; i++) {
    const long long place = (long long)(lane / 4) * INPUTS + (warp * PROJECT_PAIRS * 2 + i) * GROUP + lane % 4 * 8;
    x[i] = lane / 4 < p.rows ? __ldcg((const uint4*)(p.input + place * 2)) : make_uint4(0, 0, 0, 0);
  }
  const u32 unit = quantise_share<PROJECT_PAIRS * 2>(x, [&](int i, float(&v)[8]) { unpack_bf16(x[i], v); });
  if (lane % 4 == 0) s.units[warp][lane / 4] = FP8_TO_HALF * power_value(unit);
  __syncwarp();
  const float2 units = *(const float2*)&s.units[warp][lane % 4 * 2];
#pragma unroll 1
  for (int own = 0; begin + own < end; own++) {
    wait_for(p, &s.there[own]);
    const u32 page = shared_address(memory) + own * TILE_BYTES + warp * PROJECT_PAIRS * 512 + lane * 16;
    const float2* block = (const float2*)(s.block_scales[own] + warp * PROJECT_PAIRS * 2);
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < PROJECT_PAIRS; i++) {
      const uint4 w = load_shared(page + i * 512);
      const float2 scales = block[i];
      add_group(sum, w.x, w.y, scales.x, x[2 * i]);
      add_group(sum, w.z, w.w, scales.y, x[2 * i + 1]);
    }
    float* to = s.parts[own][warp] + lane % 4 * 2 * TILE_OUTPUTS + lane / 4;
    to[0] = sum[0] * units.x;
    to[TILE_OUTPUTS] = sum[1] * units.y;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&s.whole[own]));
  }
}

// The plain way of sending: a kernel of its own that reads the finished partial sums.
extern "C" __global__ void __launch_bounds__(CONSUME_THREADS) output_push(const Params p) {
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

// Adds a thread's two pairs of all ranks, in rank order; false: somebody gave up. What has not come is asked for at once.
DEV bool take(const Params& p, u32 epoch, int row, int pair, float (&out)[4]) {
  uint4 words[RANKS];  // of both pairs: value, tag
  const u64* inbox = p.inboxes[p.rank];
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) words[rank] = make_uint4(0, ~epoch, 0, 0);
  u32 polls = 0;
  bool missing = true;
  while (missing) {
    if (++polls % 256 == 0 && (polls > p.spin_limit || load_system_word(p.errors[p.rank]))) return false;
    missing = false;
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++)
      if (words[rank].y != epoch || words[rank].w != epoch)
        words[rank] = load_system_words(inbox + inbox_place(p, epoch, rank, row, pair));
#pragma unroll
    for (int rank = 0; rank < RANKS; rank++) missing |= words[rank].y != epoch || words[rank].w != epoch;
  }
#pragma unroll
  for (int rank = 0; rank < RANKS; rank++) {
    out[0] += bf_low(words[rank].x), out[1] += bf_high(words[rank].x);
    out[2] += bf_low(words[rank].z), out[3] += bf_high(words[rank].z);
  }
  return true;
}
// Every warp of the cluster tells all of the cluster's blocks its sum.
DEV float sum_over_cluster(float x, float (&across)[CLUSTER * CONSUME_WARPS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int o = 16; o; o /= 2) x += __shfl_xor_sync(~0u, x, o);
  cluster_wait();  // all of them run
  if (lane < CLUSTER) store_in_cluster(across + blockIdx.x % CLUSTER * CONSUME_WARPS + warp, lane, x);
  cluster_arrive();
  cluster_wait();
  float total = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER * CONSUME_WARPS; i += 4) {
    const float4 part = *(const float4*)(across + i);
    total += part.x + part.y + (part.z + part.w);
  }
  return total;
}

// A cluster a row, a thread four outputs: 2 pairs. What does not come from the projection is loaded first.
extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(CONSUME_THREADS) output_consume(const Params p) {
  __shared__ __align__(16) float across[CLUSTER * CONSUME_WARPS];
  __shared__ u32 epoch;
  const int thread = threadIdx.x, row = blockIdx.x / CLUSTER;
  const int n = (blockIdx.x % CLUSTER * CONSUME_THREADS + thread) * 4;
  cluster_arrive();
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
  const float factor = rsqrtf(sum_over_cluster(square, across) / HIDDEN + p.eps);
  *(uint2*)(p.out + ((long long)row * HIDDEN + n) * 2) =
      make_uint2(bf_pair(y[0] * factor * bf_low(norm.x), y[1] * factor * bf_high(norm.x)),
                 bf_pair(y[2] * factor * bf_low(norm.y), y[3] * factor * bf_high(norm.y)));
  wait_for_earlier_kernel();  // so that what comes after this kernel comes after the projection too
}
