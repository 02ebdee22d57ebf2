// Words that other GPUs of the host write and read: relaxed, at the scope of the system, so that no cache of this GPU
// answers for them; and how a launch ends on all ranks.
#pragma once
#include "ptx.cuh"

DEV void store_system(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEV u64 load_system(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEV uint4 load_system_words(const u64* p) {  // two that lie side by side; each is whole, they may be of different times
  u64 v, w;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v), "=l"(w) : "l"(p) : "memory");
  return make_uint4((u32)v, (u32)(v >> 32), (u32)w, (u32)(w >> 32));
}
DEV u32 load_system_word(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEV void store_system_word(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Notes `code` in this rank's error word and tells the others, in theirs with `mark` set. The first reason stays.
DEV void tell_error(u32* const* errors, int rank, int ranks, u32 code, u32 mark) {
  atomicCAS(errors[rank], 0u, code);
  const u32 told = load_system_word(errors[rank]) | mark;
  for (int r = 0; r < ranks; r++)
    if (r != rank && !load_system_word(errors[r])) store_system_word(errors[r], told);
}
