// Matrices in GGUF's Q4_1 and Q8_0 blocks.
//
// A block is 32 columns of one row. Blocks of sixteen rows are interleaved so that a vector lane is an output row:
//   Q4_1: 16 half scales, 16 half minima, then 4 x 16 words; word j of lane i holds columns 8j to 8j + 7 of row i.
//   Q8_0: 16 half scales, then 8 x 16 words; word j of lane i holds columns 4j to 4j + 3 of row i, as signed bytes.
// That is a permutation of the file's bits, so a weight is the file's weight, exactly: q * d + m or q * d.
#pragma once

#include "vector.h"

namespace {

constexpr int kBlock = 32;

enum Format : int32_t { kQ4_1 = 0, kQ8_0 = 1 };

struct Matrix {
    const uint8_t* blocks;
    int32_t format, rows, columns;

    int groups() const { return (rows + kLanes - 1) / kLanes; }
    int padded() const { return groups() * kLanes; }
    size_t block_bytes() const { return kLanes * (format == kQ4_1 ? 20 : 34); }
    size_t group_bytes() const { return block_bytes() * (columns / kBlock); }
};

inline float half_to_float(uint16_t half) {
    Halves halves{half};
    return widen(&halves)[0];
}

// One row of the matrix, widened: an embedding look-up.
void read_row(const Matrix& w, int row, float* out) {
    const uint8_t* block = w.blocks + (row / kLanes) * w.group_bytes();
    const int lane = row % kLanes;
    for (int c = 0; c < w.columns; c += kBlock, block += w.block_bytes()) {
        uint16_t half[2];
        std::memcpy(&half[0], block + 2 * lane, 2);
        std::memcpy(&half[1], block + 32 + 2 * lane, 2);
        const float d = half_to_float(half[0]), m = half_to_float(half[1]);
        for (int i = 0; i < kBlock; ++i) {
            if (w.format == kQ8_0) {
                out[c + i] = static_cast<int8_t>(block[32 + (i / 4) * 64 + 4 * lane + i % 4]) * d;
            } else {
                uint32_t word;
                std::memcpy(&word, block + 64 + (i / 8) * 64 + 4 * lane, 4);
                out[c + i] = ((word >> (4 * (i % 8))) & 15) * d + m;
            }
        }
    }
}

// From the file's order to ours. order[i] is the file's row for our row i; rows past the end become zeros.
void interleave(const uint8_t* from, const int64_t* order, const Matrix& to, uint8_t* out) {
    const int blocks = to.columns / kBlock;
    const size_t file_block = to.format == kQ4_1 ? 20 : 34;
    std::memset(out, 0, to.groups() * to.group_bytes());
    for (int row = 0; row < to.rows; ++row) {
        const uint8_t* source = from + order[row] * blocks * file_block;
        uint8_t* target = out + (row / kLanes) * to.group_bytes();
        const int lane = row % kLanes;
        for (int b = 0; b < blocks; ++b, source += file_block, target += to.block_bytes()) {
            std::memcpy(target + 2 * lane, source, 2);
            if (to.format == kQ8_0) {
                for (int j = 0; j < 8; ++j) std::memcpy(target + 32 + j * 64 + 4 * lane, source + 2 + 4 * j, 4);
                continue;
            }
            std::memcpy(target + 32 + 2 * lane, source + 2, 2);
            // In the file, byte i holds column i in its low half and column i + 16 in its high half.
            for (int j = 0; j < 4; ++j) {
                uint32_t word = 0;
                for (int k = 0; k < 8; ++k) {
                    const int column = 8 * j + k;
                    const uint8_t byte = source[4 + column % 16];
                    word |= uint32_t(column < 16 ? byte & 15 : byte >> 4) << (4 * k);
                }
                std::memcpy(target + 64 + j * 64 + 4 * lane, &word, 4);
            }
        }
    }
}

}  // namespace
