// More instructions: matrices in shared memory, small floats, clusters of blocks, kernels that start early.
#pragma once
#include "ptx.cuh"

// What this thread has stored, other blocks see before what it stores or signals later.
DEV void stores_before() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// What every step reads again stays in the L2 if it can.
DEV u64 keep_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
DEV uint4 load_by_policy(const uint4* p, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
  return v;
}

// ---- small floats

DEV u32 fp8_pair(float low, float high) {  // two e4m3
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
DEV u32 fp8_pair_to_half(u32 two) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)two));
  return pair;
}
DEV u32 half_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEV float half_low(u32 pair) {
  float x;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(x) : "r"(pair));
  return x;
}

// ---- matrices

// Four matrices of 8 rows x 16 bytes, whose rows the lanes' addresses are: lanes 8i .. 8i + 7 of matrix i.
DEV void load_matrices(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
DEV void load_matrices_transposed(u32 (&m)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}
// An operand of the asynchronous instruction: units of 8 rows x 16 bytes, row after row, 128 bytes; `next` bytes from a unit
// to that of the next 16 inputs, 128 from one to that of the next 8 outputs. Addresses name the block's place in its cluster
// above bit 23: other fields of the operand are there.
DEV u64 operand(u32 address, u32 next) {
  return (address & 0x3ffff) >> 4 | (u64)(next >> 4) << 16 | (u64)(128 >> 4) << 32;
}
// Four warps: d = A b for 64 outputs, 32 inputs, 8 rows, all e4m3 in shared memory. After begin; d is there when at most
// so many later batches, each ended by commit, are awaited.
DEV void multiply_group(float (&d)[4], u64 weights, u64 rows) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(weights), "l"(rows));
}
DEV void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void multiply_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER, int COUNT>
DEV void multiply_wait(float (&d)[COUNT][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
#pragma unroll
  for (int i = 0; i < COUNT; i++)  // no use of them moves up
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}
// What this thread has written to shared memory, asynchronous instructions may read (after a barrier).
DEV void shared_for_matrices() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters

// Like cluster_arrive, without its stores: releasing them would wait for the whole GPU's memory.
DEV void cluster_here() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEV u32 address_in_block(u32 here, u32 block) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  return there;
}
// To another block's shared memory; its barrier counts the bytes.
DEV void send(u32 to, float a, float b, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(a),
               "f"(b), "r"(barrier) : "memory");
}
DEV void send(u32 to, float a, float b, float c, float d, u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}
DEV void barriers_for_cluster() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void fetch_line_into_l2(const u8* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }
DEV void fetch_into_l2(const u8* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
