// The sequential proposals of a Markov draft head in one persistent launch: for step i, with token t[i] known,
//   logits = base[i] + head . embed[t[i]],   t[i + 1] = argmax(logits) or argmax(logits / temperature + noise).
//
// A block owns a range of the vocabulary. Most of its rows of the head stay on the chip for all steps: RESIDENT tiles of
// 16 rows in shared memory, one tile a warp in registers; the others pass: they are read again in every step, from L2, the
// first of them while the step's token is still being agreed on. Blocks, and ranks of a vocabulary split over GPUs, agree on
// each token through 64-bit words that carry value, index and the launch's tag: the data is its own signal. Up to MAX_REQUESTS requests are the columns of the matrix instructions.
#include "system.cuh"
#include "tensor.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, ROWS = 16;  // rows of a tile
constexpr int K_PAIRS = RANK / 32;                          // pairs of matrix instructions along the rank
// Of a tile; and of tiles that pass, on their way at the least: so many registers are idle while a token is agreed on.
constexpr int FRAGMENTS = 2 * K_PAIRS, DEPTH = FRAGMENTS < 8 ? FRAGMENTS : 8;
constexpr int TILE_BYTES = ROWS * RANK * 2;
constexpr int TAG_BITS = 15, INDEX_BITS = 17, COPY_STAGE = 15;
constexpr int ROUNDS = (MAX_TILES * ROWS + THREADS - 1) / THREADS;  // rows of a thread, when one is chosen
constexpr bool AHEAD = MAX_REQUESTS == 1;  // base logits come a step ahead
constexpr int NOT_RESIDENT = MAX_TILES - WARPS;             // tiles of a block that no register holds
constexpr bool PASSES = NOT_RESIDENT > RESIDENT;
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
  int requests, steps, local_vocabulary, first_token, tiles, rank;
  u32 spin_limit;
};

struct Shared {
  float logits[MAX_REQUESTS][MAX_TILES * ROWS];
  u64 best[MAX_REQUESTS][WARPS];
  alignas(16) u8 embeddings[MAX_REQUESTS][RANK * 2 + 64];  // of the step's tokens; padded, so that neighbours lie in other banks
  float base[AHEAD ? ROUNDS * THREADS : 1];
  float temperatures[MAX_REQUESTS];
  u64 seeds[MAX_REQUESTS], positions[MAX_REQUESTS];
  u32 epoch, failed;
  u64 barriers[RESIDENT > 0 ? RESIDENT : 1];
};
static_assert(RESIDENT * TILE_BYTES + sizeof(Shared) <= SHARED_BYTES, "the plan counts shared memory");

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
    fetch_line_into_l2((const u8*)(p.base + request * p.base_request + step * p.base_step + first_row + row));
  }
}
// A warp: the embedding of a request's token, for all.
DEV void fetch_embedding(const Params& p, Shared& s, int request, long long token, int lane) {
  if (lane < RANK / 8) *(uint4*)(s.embeddings[request] + lane * 16) = load_constant(p.embedding + (token * (RANK / 8) + lane) * 16);
}
// What a lane multiplies with: 8 consecutive elements of its request's embedding for a pair of instructions.
DEV uint4 embedding_of(const Shared& s, int lane, int pair) {
  return lane / 4 < MAX_REQUESTS ? *(const uint4*)(s.embeddings[lane / 4] + lane % 4 * 16 + pair * 64) : make_uint4(0, 0, 0, 0);
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
    mma(even, load(2 * k), b[k].x, b[k].y);
    mma(odd, load(2 * k + 1), b[k].z, b[k].w);
  }
  keep_logits(s, lane, tile, even, odd);
}
// Fragments that pass, on their way. They take the registers that the embeddings of the other tiles need later.
DEV void begin_passing(uint4 (&w)[DEPTH], bool any, const uint4* from, u64 policy) {
#pragma unroll
  for (int i = 0; i < DEPTH; i++) w[i] = any ? load_by_policy(from + i * 32, policy) : make_uint4(0, 0, 0, 0);
}
// A tile that passes; `next`: this warp's tile after it, or null.
DEV void multiply_passing(Shared& s, int lane, int tile, uint4 (&w)[DEPTH], const uint4* from, const uint4* next, u64 policy) {
  float sum[2][4] = {};
#pragma unroll
  for (int i = 0; i < FRAGMENTS; i++) {
    const uint4 b = embedding_of(s, lane, i / 2);
    mma(sum[i % 2], w[i % DEPTH], i % 2 ? b.z : b.x, i % 2 ? b.w : b.y);
    if (i + DEPTH < FRAGMENTS) w[i % DEPTH] = load_by_policy(from + (i + DEPTH) * 32, policy);
    else if (next) w[i % DEPTH] = load_by_policy(next + (i + DEPTH - FRAGMENTS) * 32, policy);
  }
  keep_logits(s, lane, tile, sum[0], sum[1]);
}

DEV int own_rank(const Params& p) { return RANKS > 1 ? p.rank : 0; }
// Ends the launch on all ranks.
DEV void give_up(const Params& p, Shared& s, int stage) {
  tell_error(p.errors, own_rank(p), RANKS, 1u + blockIdx.x * 16 + stage, 0x80000000u);
  s.failed = 1;
}

DEV bool has_come(const Params& p, Shared& s, int tile) {
  u32 polls = 0;
  while (!barrier_done(shared_address(&s.barriers[tile]), 0))
    if (++polls > p.spin_limit) return false;
  return true;
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
  const int slot = ((step * MAX_REQUESTS + warp) * RANKS + own_rank(p)) * BLOCKS + blockIdx.x;
  if (lane < RANKS) store_system(p.inboxes[lane] + slot, best);
  if (lane < RANK * 2 / 128) {  // a candidate's embedding is wanted soon: into L2
    const int token = (1 << INDEX_BITS) - 1 - (int)((best >> TAG_BITS) & ((1u << INDEX_BITS) - 1));
    fetch_line_into_l2(p.embedding + (long long)token * (RANK * 2) + lane * 128);
  }
}
// Waits for the words of all blocks of all ranks. A warp a request, some words a lane, all asked for at once.
DEV void agree(const Params& p, Shared& s, int step) {
  constexpr int WORDS = RANKS * BLOCKS, BATCH = (WORDS + 31) / 32 < 9 ? (WORDS + 31) / 32 : 9;
  const int lane = threadIdx.x % 32, request = threadIdx.x / 32;
  if (request >= p.requests) return;
  const u32 mask = (1u << TAG_BITS) - 1, tag = s.epoch & mask;
  const u64* inbox = p.inboxes[own_rank(p)] + (step * MAX_REQUESTS + request) * WORDS + lane;
  u64 best = 0;
  u32 polls = 0;
  bool failed = false;
  for (u32 from = lane; from < WORDS && !failed; from += 32 * BATCH, inbox += 32 * BATCH) {
    u32 missing = 0;
#pragma unroll
    for (int i = 0; i < BATCH; i++) missing |= (u32)(from + 32 * i < WORDS) << i;
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
      failed = missing && ++polls % 64 == 0 && (polls > p.spin_limit || load_system_word(p.errors[own_rank(p)]));
    }
  }
  if (failed) give_up(p, s, step);
#pragma unroll
  for (int o = 16; o; o /= 2) {
    const u64 other = __shfl_xor_sync(~0u, best, o);
    best = other > best ? other : best;
  }
  const int found = (1 << INDEX_BITS) - 1 - (int)((best >> TAG_BITS) & ((1u << INDEX_BITS) - 1));
  const int token = min(found, p.local_vocabulary * RANKS - 1);  // where nothing came, nothing was found
  fetch_embedding(p, s, request, token, lane);
  if (lane == 0 && blockIdx.x == 0) p.tokens[request * p.steps + step] = token;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) markov_proposals(const Params p) {
  u8* resident = dynamic_shared();
  Shared& s = *(Shared*)(resident + RESIDENT * TILE_BYTES);
  const int thread = threadIdx.x, block = blockIdx.x;
  int lane = thread % 32, warp = thread / 32;
  const int first = (int)((long long)p.tiles * block / gridDim.x);
  const int tiles = (int)((long long)p.tiles * (block + 1) / gridDim.x) - first;
  const int rows = max(0, min(tiles * ROWS, p.local_vocabulary - first * ROWS));
  const uint4* head = p.head + (long long)first * (TILE_BYTES / 16);
  const int others = max(0, tiles - WARPS);  // tiles that no register holds come first
  const int kept = PASSES ? min(others, RESIDENT) : others, passing = others - kept;
  if (thread == 0) {
    p.epochs[block] = s.epoch = __ldcg(p.epochs + block) + 1;
    s.failed = load_system_word(p.errors[own_rank(p)]) != 0;
    for (int i = 0; i < kept; i++) barrier_init(shared_address(&s.barriers[i]), 1);
    barriers_for_cluster();
    const u64 policy = read_once_policy();
    for (int i = 0; i < kept; i++) {
      const u32 barrier = shared_address(&s.barriers[i]);
      barrier_expect(barrier, TILE_BYTES);
      copy_bulk(shared_address(resident + i * TILE_BYTES), (const u8*)head + (long long)i * TILE_BYTES, TILE_BYTES,
                barrier, policy);
    }
  }
  if (thread < p.requests) {
    s.temperatures[thread] = p.temperatures[thread];
    s.seeds[thread] = p.seeds[thread], s.positions[thread] = p.positions[thread];
  }
  // What the first step starts with. Where all of the head comes to the chip now, asked for before it.
  const auto fetch_anchors = [&] {
    if (warp < MAX_REQUESTS) fetch_embedding(p, s, warp, warp < p.requests ? p.anchors[warp] : 0, lane);
  };
  if (!PASSES) fetch_anchors();
  const bool own = others + warp < tiles;
  const u64 once = read_once_policy(), keep = keep_policy();
  uint4 mine[2 * K_PAIRS];
#pragma unroll
  for (int k = 0; k < 2 * K_PAIRS; k++)
    mine[k] = own ? load_by_policy(head + ((others + warp) * 2 * K_PAIRS + k) * 32 + lane, once) : make_uint4(0, 0, 0, 0);
  uint4 w[DEPTH];
  const uint4* mine_passing = head + (kept + warp) * (TILE_BYTES / 16) + lane;
  if (PASSES) begin_passing(w, warp < passing, mine_passing, keep);
  prefetch_base(p, first * ROWS, rows);
  copy_base(p, s, 0, first * ROWS, rows);
  if (PASSES) fetch_anchors();
  __syncthreads();
  for (int step = 0; step < p.steps && !s.failed; step++) {
    forget(lane);
    forget(warp);
#pragma unroll 1
    for (int n = warp; PASSES && n < passing; n += WARPS) {
      const uint4* from = head + (kept + n) * (TILE_BYTES / 16) + lane;
      multiply_passing(s, lane, kept + n, w, from, n + WARPS < passing ? from + WARPS * (TILE_BYTES / 16) : nullptr, keep);
    }
    uint4 b[K_PAIRS];
#pragma unroll
    for (int k = 0; k < K_PAIRS; k++) b[k] = embedding_of(s, lane, k);
#pragma unroll 1
    for (int tile = (warp - passing) & (WARPS - 1); tile < kept; tile += WARPS) {  // those without a last passing one first
      if (step == 0 && !has_come(p, s, tile)) give_up(p, s, COPY_STAGE);
      const u32 from = shared_address(resident) + tile * TILE_BYTES + lane * 16;
      multiply(s, lane, tile, b, [&](int k) { return load_shared(from + k * 512); });
    }
    if (own) multiply(s, lane, others + warp, b, [&](int k) { return mine[k]; });
    __syncthreads();
    publish_best(p, s, step, first * ROWS, rows);
    copy_base(p, s, step + 1, first * ROWS, rows);
    if (PASSES) begin_passing(w, warp < passing && step + 1 < p.steps, mine_passing, keep);
    agree(p, s, step);
    __syncthreads();
  }
  if (s.failed && thread < kept) has_come(p, s, thread);  // no copy may outlive the block
}
