// Smaller forms of float32 arrays for a slow network: bfloat16 (half the bytes) and int8 in blocks (about a quarter).
//
// The bytes depend only on the numbers, not on the machine or the compiler's choice of instructions, so that ranks
// which decode the same bytes hold the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtrain {

// bf16: round to nearest even; a NaN stays a NaN, infinities stay.
// int8: blocks of 256 values, each block [float32 scale][256 x int8], the last block shorter; scale = max|x| / 127.
//       Zeros are exact. The error of a value is at most half a scale (and a rounding of float32). A block that holds
//       an infinity or a NaN is decoded to NaN throughout, so that a guard against non-finite gradients sees it; one
//       whose largest magnitude is below 2^-100 is decoded to zeros.
enum class Wire : uint8_t { bf16, int8 };

constexpr size_t kInt8Block = 256;

// Bytes that `count` values take on the wire. Values [k * 256, ...) start at encoded_size(wire, k * 256), so an array
// may be cut at any multiple of kInt8Block and its pieces encoded and decoded on their own.
size_t encoded_size(Wire wire, size_t count);

// Write encoded_size(wire, count) bytes to `to`. No alignment is needed.
void encode(Wire wire, const float* from, size_t count, uint8_t* to);

// to[i] = value i.
void decode(Wire wire, const uint8_t* from, size_t count, float* to);

// to[i] = to[i] + value i, each product and each sum rounded on its own (never fused), the same on every machine.
void decode_add(Wire wire, const uint8_t* from, size_t count, float* to);

}  // namespace dtrain
