// A block's product: 64 outputs of e4m3 weights by at most 8 quantised rows, by the asynchronous matrix instruction, which
// takes both from shared memory as they are. Each group of 32 inputs is one instruction with sums of its own, which the
// scales of weights and rows then multiply. Two groups of four warps have half of the inputs each.
#pragma once
#include "chain.cuh"

constexpr int TILE = 64, GROUP_BYTES = TILE * GROUP, ROWS_BYTES = MAX_ROWS * GROUP;

__host__ __device__ constexpr int batch_of(int each) {
  for (int size = 10; size > 1; size--)
    if (each % size == 0) return size;
  return 1;
}
template <int INPUTS, int BLOCKS>  // inputs of a block; blocks of a cluster, which share the inputs of a tile
struct Product {
  static constexpr int COUNT = INPUTS / GROUP, EACH = COUNT / 2;  // groups of inputs, of the block and of four warps
  static constexpr int BATCH = batch_of(EACH), BATCHES = EACH / BATCH, OWN = TILE / BLOCKS;
  static_assert(INPUTS % 64 == 0 && (BLOCKS == 1 || BLOCKS == 4), "sizes");
  struct Shared {
    alignas(128) u8 weights[COUNT * GROUP_BYTES];
    alignas(128) u8 rows[COUNT * ROWS_BYTES];  // [group][half of its inputs][row][16]
    float row_scales[COUNT][MAX_ROWS], scales[2][COUNT];
    alignas(16) float parts[2 * BLOCKS][MAX_ROWS * (BLOCKS == 1 ? TILE + 4 : OWN)];
    u64 loaded[2 * BATCHES], joined;
  };

  // Starts the copies of this block's weights and scales: before anything is waited for.
  static DEV_MEMBER void start(Shared& s, int tile, int part, const u8* weights, const float* scales) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * BATCHES; i++) barrier_init(shared_address(&s.loaded[i]), 1);
      barrier_init(shared_address(&s.joined), 1);
      barriers_for_cluster();
      const u64 policy = read_once_policy();
      const u8* from = weights + ((long long)tile * BLOCKS + part) * COUNT * GROUP_BYTES;
      for (int i = 0; i < 2 * BATCHES; i++) {  // first batches first
        const int group = i % 2 * EACH + i / 2 * BATCH;
        barrier_expect(shared_address(&s.loaded[i]), BATCH * GROUP_BYTES);
        copy_bulk(shared_address(s.weights + group * GROUP_BYTES), from + group * GROUP_BYTES, BATCH * GROUP_BYTES,
                  shared_address(&s.loaded[i]), policy);
      }
      barrier_expect(shared_address(&s.joined), sizeof(s.parts));
    }
    for (int i = threadIdx.x; i < 2 * COUNT; i += THREADS)
      s.scales[i / COUNT][i % COUNT] = scales[(tile * 2 + i / COUNT) * (COUNT * BLOCKS) + part * COUNT + i % COUNT];
    __syncthreads();
    if (BLOCKS > 1) cluster_here();
  }
  // Eight neighbouring inputs of a row; the four lanes of a group call it together.
  static DEV_MEMBER void put(Shared& s, int row, int chunk, const float (&v)[8]) {
    const u32 power = group_power(group_largest(v));
    *(uint2*)(s.rows + chunk / 4 * ROWS_BYTES + chunk / 2 % 2 * 128 + row * 16 + chunk % 2 * 8) =
        make_uint2(rounded_fp8(v[0], v[1], v[2], v[3], power), rounded_fp8(v[4], v[5], v[6], v[7], power));
    if (chunk % 4 == 0) s.row_scales[chunk / 4][row] = power_value(power);
  }
  // This thread's sums over its half of the inputs: outputs 16 w + g and 8 more, rows 2q and 2q + 1 (w: warp of four).
  static DEV_MEMBER void multiply(const Chain& p, Shared& s, float (&sum)[4]) {
    const int thread = threadIdx.x, warp = thread / 32 % 4, q = thread % 4;
    const int half = __shfl_sync(~0u, thread / 128, 0);  // in a uniform register, as operands are
    const u64 a = operand(shared_address(s.weights + half * EACH * GROUP_BYTES), 1024);
    const u64 b = operand(shared_address(s.rows + half * EACH * ROWS_BYTES), 128);
    float d[2][BATCH][4];  // one batch is multiplied while the one before it is scaled
    auto multiply_batch = [&](int batch) {
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        multiply_group(d[batch % 2][i], a + (batch * BATCH + i) * (GROUP_BYTES >> 4), b + (batch * BATCH + i) * (ROWS_BYTES >> 4));
      multiply_commit();
    };
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
    for (int batch = 0; batch < BATCHES; batch++) wait_for_copy(p, shared_address(&s.loaded[batch * 2 + half]));
    __syncwarp();
    multiply_begin();
    multiply_batch(0);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
      if (batch + 1 < BATCHES) {
        multiply_batch(batch + 1);
        multiply_wait<1>(d[batch % 2]);
      } else {
        multiply_wait<0>(d[batch % 2]);
      }
#pragma unroll
      for (int i = 0; i < BATCH; i++) {
        const int group = half * EACH + batch * BATCH + i;
        const float scale = s.scales[warp / 2][group];
        const float2 units = *(const float2*)&s.row_scales[group][q * 2];
        const float low = units.x * scale, high = units.y * scale;
        float* v = d[batch % 2][i];
        sum[0] += v[0] * low, sum[1] += v[1] * high, sum[2] += v[2] * low, sum[3] += v[3] * high;
      }
    }
  }
  // All sums of a block's tile meet: store(row, output, pair) gets two neighbouring outputs.
  template <class Store>
  static DEV_MEMBER void join(Shared& s, const float (&sum)[4], Store store) {
    static_assert(BLOCKS == 1, "alone");
    const int thread = threadIdx.x, half = thread / 128, warp = thread / 32 % 4, g = thread % 32 / 4, q = thread % 4;
    float* to = s.parts[half] + q * 2 * (TILE + 4) + warp * 16 + g;
    to[0] = sum[0], to[TILE + 4] = sum[1], to[8] = sum[2], to[TILE + 4 + 8] = sum[3];
    __syncthreads();
    const int row = thread / 32, output = thread % 32 * 2;
    const float2 a = *(const float2*)(s.parts[0] + row * (TILE + 4) + output);
    const float2 b = *(const float2*)(s.parts[1] + row * (TILE + 4) + output);
    store(row, output, bf_pair(a.x + b.x, a.y + b.y));
  }
  // The same over a cluster: block b gets outputs 16b .. 16b + 15 of all, which are its warps' b. All blocks of the cluster
  // have begun: cluster_wait after start, before the inputs are waited for, when it costs nothing.
  template <class Store>
  static DEV_MEMBER void join_cluster(const Chain& p, Shared& s, u32 rank, const float (&sum)[4], Store store) {
    static_assert(BLOCKS == 4 && OWN == 16, "four");
    const int thread = threadIdx.x, half = thread / 128, warp = thread / 32 % 4, g = thread % 32 / 4, q = thread % 4;
    const u32 to = address_in_block(shared_address(s.parts[rank * 2 + half] + g * MAX_ROWS + q * 2), warp);
    const u32 barrier = address_in_block(shared_address(&s.joined), warp);
    send(to, sum[0], sum[1], barrier);
    send(to + 8 * MAX_ROWS * 4, sum[2], sum[3], barrier);
    if (thread >= OWN * MAX_ROWS) return;
    wait_for_copy(p, shared_address(&s.joined));
    __syncwarp();
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++) total += s.parts[i][thread];
    const int output = thread / MAX_ROWS, row = thread % MAX_ROWS;
    const float next = __shfl_down_sync(~0u, total, MAX_ROWS);
    if (output % 2 == 0) store(row, rank * OWN + output, bf_pair(total, next));
  }
};
