// Words that other ranks see: published like words of other blocks.
#pragma once
#include "ptx.cuh"
template <class T> DEV T atomicCAS(T* p, T old, T x) { T was = *p; if (was == old) *p = x; return was; }
DEV void store_system(u64* p, u64 v) { store_exchange(p, (u32)v, (u32)(v >> 32)); }
DEV u64 load_system(const u64* p) { emu_yield(); return *p; }
DEV uint4 load_system_words(const u64* p) { return load_exchange(p); }
DEV u32 load_system_word(const u32* p) { return load_exchange_word(p); }
DEV void store_system_word(u32* p, u32 v) { *p = v; }
DEV void tell_error(u32* const* errors, int rank, int ranks, u32 code, u32 mark) {
  for (int r = 0; r < ranks; r++) *errors[r] = code;
}
