// The sequential proposals of a Markov draft head in one persistent launch: for step i, with token t[i] known,
//   logits = base[i] + head . embed[t[i]],   t[i + 1] = argmax(logits) or argmax(logits / temperature + noise).
//
// A block owns a range of the vocabulary. Most of its rows of the head stay on the chip for all steps: RESIDENT tiles of
// 16 rows in shared memory, one tile a warp in registers; the others are read again, from L2. Blocks, and ranks of a
// vocabulary split over GPUs, agree on each token through 64-bit words that carry value, index and the launch's tag:
// the data is its own signal. Up to MAX_REQUESTS requests are the columns of the matrix instructions.
#include "system.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, ROWS = 16;  // rows of a tile
constexpr int K_PAIRS = RANK / 32;                          // pairs of matrix instructions along the rank
constexpr int TILE_BYTES = ROWS * RANK * 2;
constexpr int TAG_BITS = 15, INDEX_BITS = 17, COPY_STAGE = 15;
constexpr int ROUNDS = (MAX_TILES * ROWS + THREADS - 1) / THREADS;  // rows of a thread, when one is chosen
constexpr bool AHEAD = MAX_REQUESTS == 1;  // base logits come a step ahead
constexpr int NOT_RESIDENT = MAX_TILES - WARPS;             // tiles of a block that no register holds
static_assert(RESIDENT <= (NOT_RESIDENT > 0 ? NOT_RESIDENT : 0), "more tiles in shared memory than there are");

struct Params {
  const uint4* head;               // fragments [tile][K_PAIRS * 2][lane], this rank's part
  const u8* embedding;             // [vocabulary, RANK] bfloat16, whole
  const float* base;               // [request][step][local vocabulary]
  const long long* anchors;        // [request]
  const float* temperatures;       // [request], 0: greedy
  const long long* seeds;          // [request]
  const long long* positions;      // [request], of the first proposal
  long long* tokens;               // [request][step]
  float* logits;                   // [request][step][local vocabulary], or null
  u64* inboxes[MAX_RANKS];         // of each rank: [step][request][rank][block]
  u32* errors[MAX_RANKS];          // of each rank: one word, 0 while all is well
  u32* epochs;                     // [block], launches so far
  long long base_request, base_step;
  int requests, steps, local_vocabulary, first_token, tiles, rank, ranks;
  u32 spin_limit;
};

struct Shared {
  float logits[MAX_REQUESTS][MAX_TILES * ROWS];
  u64 best[MAX_REQUESTS][WARPS];
  int tokens[MAX_REQUESTS];
  float base[AHEAD ? ROUNDS * THREADS : 1];
  float temperatures[MAX_REQUESTS];
  u64 seeds[MAX_REQUESTS], positions[MAX_REQUESTS];
  u32 epoch, failed;
  u64 barriers[RESIDENT > 0 ? RESIDENT : 1];
};

// Head rows that are read in every step stay in L2 if they can; what goes to the chip need not.
DEV uint4 load_kept(const uint4* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
  return v;
}
DEV u64 keep_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Both halves of A are used here, unlike in ptx.cuh.
DEV void mma16(float (&d)[4], uint4 a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
DEV u64 mix64(u64 x) {  // the finaliser of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
// Standard Gumbel noise of (seed, position, token): see draft/reference.py.
DEV float gumbel(u64 stream, int token) {
  const u64 bits = mix64(stream + (u64)(token + 1) * 0x9e3779b97f4a7c15ull);
  const float u = ((float)(u32)(bits >> 41) + 0.5f) * (1.f / 8388608.f);
  return -logf(-logf(u));
}
DEV void prefetch_base(const Params& p, int first_row, int rows) {
  const int lines = rows / 32 + 1;
  for (int i = threadIdx.x; i < p.requests * p.steps * lines; i += THREADS) {
    const int row = min(i % lines * 32, rows - 1), step = i / lines % p.steps, request = i / lines / p.steps;
    if (row < 0) continue;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.base + request * p.base_request + step * p.base_step + first_row + row));
  }
}
// What a lane multiplies with: 8 consecutive elements of its request's embedding for each pair of instructions.
DEV void load_embeddings(const Params& p, const Shared& s, int lane, uint4 (&b)[K_PAIRS]) {
  const int request = lane / 4, q = lane % 4;
  if (request < p.requests) {
    const u8* row = p.embedding + (long long)s.tokens[request] * (RANK * 2) + q * 16;
#pragma unroll
    for (int k = 0; k < K_PAIRS; k++) b[k] = load_constant(row + k * 64);
  } else {
#pragma unroll
    for (int k = 0; k < K_PAIRS; k++) b[k] = make_uint4(0, 0, 0, 0);
  }
}
DEV void keep_logits(Shared& s, int lane, int tile, const float (&even)[4], const float (&odd)[4]) {
  const int row = tile * ROWS + lane / 4, request = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (request + i % 2 < MAX_REQUESTS) s.logits[request + i % 2][row + i / 2 * 8] = even[i] + odd[i];
}
template <class Load>
DEV void multiply(Shared& s, int lane, int tile, const uint4 (&b)[K_PAIRS], Load load) {
  float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < K_PAIRS; k++) {
    mma16(even, load(2 * k), b[k].x, b[k].y);
    mma16(odd, load(2 * k + 1), b[k].z, b[k].w);
  }
  keep_logits(s, lane, tile, even, odd);
}

// Ends the launch on all ranks.
DEV void give_up(const Params& p, Shared& s, int stage) {
  tell_error(p.errors, p.rank, p.ranks, 1u + blockIdx.x * 16 + stage, 0x80000000u);
  s.failed = 1;
}

// One request: its base logits of a step, on their way while the step's token is still being agreed on. A thread reads
// what it has copied.
DEV void copy_base(const Params& p, Shared& s, int step, int first_row, int rows) {
  if (!AHEAD || step >= p.steps) return;
  for (int n = threadIdx.x; n < rows; n += THREADS)
    copy_async_word(shared_address(s.base + n), p.base + step * p.base_step + first_row + n);
}
// The block's best word of each request, published to every rank.
DEV void publish_best(const Params& p, Shared& s, int step, int first_row, int rows) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  copies_done();
  for (int request = 0; request < p.requests; request++) {
    const float temperature = s.temperatures[request];
    const long long place = request * p.base_request + step * p.base_step + first_row;
    const u64 stream = mix64(s.seeds[request] ^ mix64(s.positions[request] + step + 0x9e3779b97f4a7c15ull));
    u64 best = 0;
    for (int n = thread; n < rows; n += THREADS) {
      float x = s.logits[request][n] + (AHEAD ? s.base[n] : p.base[place + n]);
      if (p.logits) p.logits[((long long)request * p.steps + step) * p.local_vocabulary + first_row + n] = x;
      const int token = p.first_token + first_row + n;
      if (temperature > 0.f) x = __fadd_rn(__fdiv_rn(x, temperature), gumbel(stream, token));
      // NaN gives the smallest key.
      const u64 word = ((u64)(x != x ? 0 : order_key(x)) << 32) | ((u64)((1u << INDEX_BITS) - 1 - token) << TAG_BITS);
      best = word > best ? word : best;
    }
#pragma unroll
    for (int o = 16; o; o /= 2) {
      const u64 other = __shfl_xor_sync(~0u, best, o);
      best = other > best ? other : best;
    }
    if (lane == 0) s.best[request][warp] = best;
  }
  __syncthreads();
  if (warp >= p.requests) return;
  u64 best = lane < WARPS ? s.best[warp][lane] : 0;
#pragma unroll
  for (int o = WARPS / 2; o; o /= 2) {
    const u64 other = __shfl_xor_sync(~0u, best, o);
    best = other > best ? other : best;
  }
  best = __shfl_sync(~0u, best, 0) | (s.epoch & ((1u << TAG_BITS) - 1));
  const int slot = ((step * MAX_REQUESTS + warp) * p.ranks + p.rank) * gridDim.x + blockIdx.x;
  if (lane < p.ranks) store_system(p.inboxes[lane] + slot, best);
  if (lane < RANK * 2 / 128) {  // a candidate's embedding is wanted soon: into L2
    const int token = (1 << INDEX_BITS) - 1 - (int)((best >> TAG_BITS) & ((1u << INDEX_BITS) - 1));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.embedding + (long long)token * (RANK * 2) + lane * 128));
  }
}
// Waits for the words of all blocks of all ranks. A warp a request, some words a lane, all asked for at once.
DEV void agree(const Params& p, Shared& s, int step) {
  constexpr int BATCH = 9;
  const int lane = threadIdx.x % 32, request = threadIdx.x / 32;
  if (request >= p.requests) return;
  const u32 mask = (1u << TAG_BITS) - 1, tag = s.epoch & mask, words = p.ranks * gridDim.x;
  const u64* inbox = p.inboxes[p.rank] + (step * MAX_REQUESTS + request) * words + lane;
  u64 best = 0;
  u32 polls = 0;
  bool failed = false;
  for (u32 from = lane; from < words && !failed; from += 32 * BATCH, inbox += 32 * BATCH) {
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < BATCH; i++) missing |= (u32)(from + 32 * i < words) << i;
    while (missing && !failed) {
      u64 got[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) got[i] = missing >> i & 1 ? load_system(inbox + 32 * i) : 0;
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if ((missing >> i & 1) && ((u32)got[i] & mask) == tag) {
          best = got[i] > best ? got[i] : best;
          missing &= ~(1u << i);
        }
      failed = missing && ++polls % 64 == 0 && (polls > p.spin_limit || load_system_word(p.errors[p.rank]));
    }
  }
  if (failed) give_up(p, s, step);
#pragma unroll
  for (int o = 16; o; o /= 2) {
    const u64 other = __shfl_xor_sync(~0u, best, o);
    best = other > best ? other : best;
  }
  const int token = (1 << INDEX_BITS) - 1 - (int)((best >> TAG_BITS) & ((1u << INDEX_BITS) - 1));
  if (lane == 0) {
    s.tokens[request] = token;
    if (blockIdx.x == 0) p.tokens[request * p.steps + step] = token;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) markov_proposals(const Params p) {
  extern __shared__ __align__(128) u8 memory[];
  u8* resident = memory;
  Shared& s = *(Shared*)(memory + RESIDENT * TILE_BYTES);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, block = blockIdx.x;
  const int first = (int)((long long)p.tiles * block / gridDim.x);
  const int tiles = (int)((long long)p.tiles * (block + 1) / gridDim.x) - first;
  const int rows = max(0, min(tiles * ROWS, p.local_vocabulary - first * ROWS));
  const uint4* head = p.head + (long long)first * (TILE_BYTES / 16);
  const int others = max(0, tiles - WARPS);  // tiles that no register holds come first
  const int kept = min(others, RESIDENT);
  if (thread == 0) {
    p.epochs[block] = s.epoch = __ldcg(p.epochs + block) + 1;
    s.failed = load_system_word(p.errors[p.rank]) != 0;
    for (int i = 0; i < kept; i++) barrier_init(shared_address(&s.barriers[i]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const u64 policy = read_once_policy();
    for (int i = 0; i < kept; i++) {
      const u32 barrier = shared_address(&s.barriers[i]);
      barrier_expect(barrier, TILE_BYTES);
      copy_bulk(shared_address(resident + i * TILE_BYTES), (const u8*)head + (long long)i * TILE_BYTES, TILE_BYTES,
                barrier, policy);
    }
  }
  if (thread < p.requests) {
    s.tokens[thread] = (int)p.anchors[thread];
    s.temperatures[thread] = p.temperatures[thread];
    s.seeds[thread] = p.seeds[thread], s.positions[thread] = p.positions[thread];
  }
  const bool own = others + warp < tiles;
  const u64 once = read_once_policy(), keep = keep_policy();
  uint4 mine[2 * K_PAIRS];
#pragma unroll
  for (int k = 0; k < 2 * K_PAIRS; k++)
    mine[k] = own ? load_kept(head + ((others + warp) * 2 * K_PAIRS + k) * 32 + lane, once) : make_uint4(0, 0, 0, 0);
  prefetch_base(p, first * ROWS, rows);
  copy_base(p, s, 0, first * ROWS, rows);
  __syncthreads();
  for (int step = 0; step < p.steps && !s.failed; step++) {
    uint4 b[K_PAIRS];
    load_embeddings(p, s, lane, b);
#pragma unroll 1
    for (int tile = warp; tile < others; tile += WARPS) {
      if (RESIDENT >= NOT_RESIDENT || tile < RESIDENT) {
        if (step == 0) {
          const u32 barrier = shared_address(&s.barriers[tile]);
          u32 polls = 0;
          while (!barrier_done(barrier, 0) && polls < p.spin_limit) polls++;
          if (polls >= p.spin_limit) give_up(p, s, COPY_STAGE);
        }
        const u32 from = shared_address(resident) + tile * TILE_BYTES + lane * 16;
        multiply(s, lane, tile, b, [&](int k) { return load_shared(from + k * 512); });
      } else {
        const uint4* from = head + tile * (TILE_BYTES / 16) + lane;
        multiply(s, lane, tile, b, [&](int k) { return load_kept(from + k * 32, keep); });
      }
    }
    if (own) multiply(s, lane, others + warp, b, [&](int k) { return mine[k]; });
    __syncthreads();
    publish_best(p, s, step, first * ROWS, rows);
    copy_base(p, s, step + 1, first * ROWS, rows);
    agree(p, s, step);
    __syncthreads();
  }
}
