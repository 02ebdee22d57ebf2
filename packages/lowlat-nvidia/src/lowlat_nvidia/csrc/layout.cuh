// Sizes of one model, given by the compiler's command line, and the exchange buffers that follow from them.
#pragma once
#include "ptx.cuh"

#ifndef BLOCKS
#define BLOCKS 128
#endif
constexpr int WARPS = 8, THREADS = 256, COPY_THREADS = 128, MAX_ROWS = 8;
// Steps of one row and of several have kernels of their own, each with registers, instructions, shared memory and exchange buffers
// for its own stages alone: either may follow the other, whatever that has left.
constexpr bool ONE = ONE_ROW;
constexpr int ROWS = ONE ? 1 : MAX_ROWS;  // that a step of this kernel may have
constexpr int SPLITS = BLOCKS / KV_HEADS;        // blocks that share one KV head
constexpr int GROUP = Q_HEADS / KV_HEADS;        // query heads of one KV head
constexpr int GROUP_DIM = GROUP * HEAD_DIM;      // query elements of one KV head
constexpr int HEAD_ROWS = GROUP_DIM + 2 * HEAD_DIM;  // projected q, k and v elements of one KV head
constexpr int QDIM = Q_HEADS * HEAD_DIM;
constexpr int BLOCK_QKV = HEAD_ROWS / SPLITS;    // outputs of one block in each stage
constexpr int BLOCK_HIDDEN = HIDDEN / BLOCKS;
constexpr int BLOCK_INTER = INTER / BLOCKS;
constexpr int BLOCK_COMBINE = GROUP_DIM / SPLITS;
constexpr int LM_TILES = (VOCAB + 16 * BLOCKS - 1) / (16 * BLOCKS) * 2;
static_assert(BLOCK_QKV % 8 == 0 && BLOCK_HIDDEN % 8 == 0 && BLOCK_INTER % 8 == 0, "tiles of 8 outputs");

// A fragment is 16 outputs x 16 inputs, or 8 x 32 of what does not fill a tile of 16: 512 bytes, 16 a lane. Each warp owns 1/8 of
// the inputs of a stage.
constexpr int FRAGMENT = 512, PAGE = PAGE_FRAGMENTS * FRAGMENT;
constexpr int K_HIDDEN = HIDDEN / 256, K_QDIM = QDIM / 256, K_INTER = INTER / 256;  // fragments a tile and warp
constexpr int LAYER_FRAGMENTS = (BLOCK_QKV / 8 + 2 * BLOCK_INTER / 8) * K_HIDDEN + BLOCK_HIDDEN / 8 * (K_QDIM + K_INTER);
constexpr int STREAM_PAGES = (LAYERS * LAYER_FRAGMENTS + LM_TILES * K_HIDDEN) / PAGE_FRAGMENTS;
static_assert(K_HIDDEN % PAGE_FRAGMENTS == 0 && K_QDIM % PAGE_FRAGMENTS == 0 && K_INTER % PAGE_FRAGMENTS == 0, "");

// Exchange buffers of one row of one layer, in 4-byte words. The last stand for what precedes layer 0.
constexpr u32 EMPTY = 0xffffffffu;  // a word that nobody has published; publishing never writes it
constexpr int W_QKV = 0;                                       // projections by KV head, float32
constexpr int W_PART = W_QKV + KV_HEADS * HEAD_ROWS;           // normalised output of each split, float32
constexpr int W_LSE = W_PART + KV_HEADS * SPLITS * GROUP_DIM;  // its log2 of the sum of exponentials
constexpr int W_ATTN = W_LSE + KV_HEADS * SPLITS * GROUP;      // attention output, bfloat16 pairs
constexpr int W_MID = W_ATTN + QDIM / 2;                       // residual times the norm after attention, pairs
constexpr int W_MID_SQUARE = W_MID + HIDDEN / 2;               // sum of squares of each block's residuals
constexpr int W_ACT = W_MID_SQUARE + BLOCKS;                   // silu(gate) * up, bfloat16 pairs
constexpr int W_OUT = W_ACT + INTER / 2;                       // residual times the next layer's first norm, pairs
constexpr int W_OUT_SQUARE = W_OUT + HIDDEN / 2;
constexpr int ROW_WORDS = W_OUT_SQUARE + BLOCKS;
constexpr int LAYER_WORDS = MAX_ROWS * ROW_WORDS;
// Layers take SLOTS buffers in turn: with fewer than there are layers, what blocks exchange stays in the L2 at any number of rows.
constexpr bool TURNS = SLOTS < LAYERS;
constexpr int BEFORE = SLOTS;  // the buffer of what precedes layer 0
constexpr long STEP_WORDS = (long)(SLOTS + 1) * LAYER_WORDS;
constexpr int PARITY = ONE ? 0 : 2, LAST_ROWS = 5;  // places in the state. A failure of either kernel ends the steps of both.
static_assert(COPIES <= MAX_ROWS, "copies lie where other rows would");
static_assert(SLOTS >= 3 || !TURNS, "a layer's words are read in the next, emptied there, and may be published in the one after that");
DEV int slot_of(int layer) { return TURNS ? layer % SLOTS : layer; }

constexpr int TENSOR_MAP = 128;  // bytes of a description of a tensor for the copy engine
struct Params {
  const u8* weights;          // packed stream of all layers and the output projection
  const u8* embedding;        // [VOCAB, HIDDEN] bfloat16
  const unsigned short* norms;  // [LAYERS, 2, HIDDEN] bfloat16, then [HIDDEN] of the last norm
  const u8* head_norms;       // [LAYERS, 2, HEAD_DIM] bfloat16 (query, key); unread without QK_NORM
  const unsigned short* biases;  // [LAYERS, KV_HEADS * HEAD_ROWS] bfloat16 of q, k and v; unread without QKV_BIAS
  const float* rotary;        // [positions, 2, HEAD_DIM / 2]: cosine, sine
  const u64* pools;           // [LAYERS, 2] addresses of K and V
  const u8* maps;             // [LAYERS, 2, TENSOR_MAP] the same as tensors [HEAD_DIM / 64, heads, slots, 64], boxes of a unit; or null
  const long long* tokens;    // [rows]
  const long long* positions; // [rows]
  const int* query_start;     // [requests + 1] first row of each request
  const long long* write_slots;  // [rows] negative for padding; null: all rows are real
  const int* table_rows;      // [requests] whose row of the page table; null: request q has row q
  const int* page_table;      // [table_rows, table_stride] page numbers
  u64 scratch;                // room for one slot, instead of the pools where all rows are padding
  u32* exchange;              // [2, STEP_WORDS] of the launched kernel, filled with EMPTY before its first step
  u32* state;                 // parity of one row, error, parity of several rows, -, blocks done, rows of the last step of several
  float* logits;              // [rows, VOCAB]
  u64* best;                  // [MAX_ROWS] greatest logit and its token, zero between steps
  long long* next_token;      // [MAX_ROWS]
  long long* stamps;          // [BLOCKS, LAYERS + 1, STAMPS] cycle counts when STAMPS > 0
  long long slot_stride, head_stride;  // elements
  int table_stride, page_shift, rows, requests;
  u32 spin_limit, zero;       // zero is 0
  float eps, head_eps;
#if ALONE
  int only_stage, only_layer;   // -1: all of them
  int first_page, end_page;     // of each warp's weights
  u32 plant;                    // a word of the exchange, or STEP_WORDS and a logit's place, whose sign is turned
  float* residuals;             // [LAYERS, 2, MAX_ROWS, HIDDEN] before the attention output and down: whole steps leave
                                // theirs, a stage alone begins with them
#endif
};
DEV int rows_of(const Params& p) { return ONE ? 1 : p.rows; }
// A build for tests (ALONE) can run one stage of one layer on what the host has put into the exchange. In all other
// builds these are constants.
#if ALONE
DEV bool alone(const Params& p) { return p.only_stage >= 0; }
DEV bool runs(const Params& p, int stage) { return !alone(p) || p.only_stage == stage; }
DEV int first_layer(const Params& p) { return alone(p) ? p.only_layer : 0; }
DEV int end_layer(const Params& p) { return alone(p) && p.only_layer < LAYERS ? p.only_layer + 1 : LAYERS; }
DEV int first_page(const Params& p) { return p.first_page; }
DEV int end_page(const Params& p) { return p.end_page; }
DEV u32 planted(const Params& p, long place, u32 value) { return place == p.plant ? value ^ 0x80000000u : value; }
DEV void hold_residual(const Params& p, int index, int row, int n, float& residual) {
  float* at = p.residuals + ((long)index * MAX_ROWS + row) * HIDDEN + n;
  if (row >= p.rows) return;
  if (alone(p)) residual = *at;
  else *at = residual;
}
#else
DEV bool alone(const Params&) { return false; }
DEV bool runs(const Params&, int) { return true; }
DEV int first_layer(const Params&) { return 0; }
DEV int end_layer(const Params&) { return LAYERS; }
DEV int first_page(const Params&) { return 0; }
DEV int end_page(const Params&) { return STREAM_PAGES; }
DEV u32 planted(const Params&, long, u32 value) { return value; }
DEV void hold_residual(const Params&, int, int, int, float&) {}
#endif
