#include "codec.h"

#include <algorithm>
#include <cstring>

#include "half.h"

#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#pragma GCC optimize("O3")
#endif

// A product and a sum must be rounded one after the other on every machine. Compilers fuse them where the processor
// can, unless the product has been through memory.
#if defined(__GNUC__)
#define DTRAIN_THROUGH_MEMORY(array) asm volatile("" : : "r"(array) : "memory")
#else
#error "a barrier against fused multiply-add is needed for this compiler"
#endif

namespace dtrain {
namespace {

// A largest magnitude below this is sent as zeros: its inverse would overflow, and no gradient is this small on
// purpose.
constexpr float kTiny = 0x1p-100f;
constexpr uint32_t kNaN = 0x7fc00000u;
constexpr uint32_t kInfinity = 0x7f800000u;

DTRAIN_INLINE void encode_bf16(const float* from, size_t count, uint8_t* to) {
  uint16_t block[kInt8Block];
  for (size_t start = 0; start < count; start += kInt8Block) {
    const size_t length = std::min(kInt8Block, count - start);
    for (size_t i = 0; i < length; ++i) block[i] = bf16_of(from[start + i]);
    std::memcpy(to + 2 * start, block, 2 * length);
  }
}

// The magnitudes of floats are ordered as their bits are, with infinities and then NaN on top.
DTRAIN_INLINE uint32_t largest_magnitude(const float* from, size_t length) {
  uint32_t largest = 0;
  for (size_t i = 0; i < length; ++i) {
    const uint32_t bits = bits_of(from[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Of finite values. Rounded up, the largest float would come back as an infinity.
DTRAIN_INLINE float scale_of(float largest) {
  const float scale = largest / 127.0f;
  return bits_of(scale * 127.0f) < kInfinity ? scale : float_of(bits_of(scale) - 1);
}

DTRAIN_INLINE void encode_int8(const float* from, size_t count, uint8_t* to) {
  float scaled[kInt8Block];
  uint8_t small[kInt8Block];
  for (size_t start = 0; start < count; start += kInt8Block) {
    const size_t length = std::min(kInt8Block, count - start);
    const uint32_t bits = largest_magnitude(from + start, length);
    const float largest = float_of(bits);
    const bool finite = bits < kInfinity;
    const bool zeros = !finite || largest < kTiny;
    const float scale = finite ? (zeros ? 0.0f : scale_of(largest)) : float_of(kNaN);
    if (zeros) {
      std::memset(small, 0, length);
    } else {
      const float inverse = 127.0f / largest;
      for (size_t i = 0; i < length; ++i) scaled[i] = from[start + i] * inverse;
      DTRAIN_THROUGH_MEMORY(scaled);
      // Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the low bits.
      for (size_t i = 0; i < length; ++i) small[i] = static_cast<uint8_t>(bits_of(scaled[i] + 12582912.0f));
    }
    std::memcpy(to, &scale, sizeof scale);
    std::memcpy(to + sizeof scale, small, length);
    to += sizeof scale + length;
  }
}

// One block of at most kInt8Block values to floats; returns the bytes used.
DTRAIN_INLINE size_t decode_block(Wire wire, const uint8_t* from, size_t length, float* to) {
  if (wire == Wire::bf16) {
    uint16_t block[kInt8Block];
    std::memcpy(block, from, 2 * length);
    for (size_t i = 0; i < length; ++i) to[i] = float_of_bf16(block[i]);
    return 2 * length;
  }
  float scale;
  int8_t block[kInt8Block];
  std::memcpy(&scale, from, sizeof scale);
  std::memcpy(block, from + sizeof scale, length);
  for (size_t i = 0; i < length; ++i) to[i] = static_cast<float>(block[i]) * scale;
  return sizeof scale + length;
}

DTRAIN_INLINE void decode_all(Wire wire, const uint8_t* from, size_t count, float* to) {
  for (size_t start = 0; start < count; start += kInt8Block) {
    from += decode_block(wire, from, std::min(kInt8Block, count - start), to + start);
  }
}

DTRAIN_INLINE void decode_add_all(Wire wire, const uint8_t* from, size_t count, float* to) {
  float block[kInt8Block];
  for (size_t start = 0; start < count; start += kInt8Block) {
    const size_t length = std::min(kInt8Block, count - start);
    from += decode_block(wire, from, length, block);
    DTRAIN_THROUGH_MEMORY(block);
    float* target = to + start;
    for (size_t i = 0; i < length; ++i) target[i] += block[i];
  }
}

DTRAIN_INLINE void encode_all(Wire wire, const float* from, size_t count, uint8_t* to) {
  wire == Wire::bf16 ? encode_bf16(from, count, to) : encode_int8(from, count, to);
}

#if defined(DTRAIN_X86)
__attribute__((target("avx2"))) void encode_avx2(Wire wire, const float* from, size_t count, uint8_t* to) {
  encode_all(wire, from, count, to);
}
__attribute__((target("avx2"))) void decode_avx2(Wire wire, const uint8_t* from, size_t count, float* to) {
  decode_all(wire, from, count, to);
}
__attribute__((target("avx2"))) void decode_add_avx2(Wire wire, const uint8_t* from, size_t count, float* to) {
  decode_add_all(wire, from, count, to);
}
bool has_avx2() {
  static const bool found = __builtin_cpu_supports("avx2") != 0;
  return found;
}
#endif

}  // namespace

size_t encoded_size(Wire wire, size_t count) {
  if (wire == Wire::bf16) return 2 * count;
  return count + (count + kInt8Block - 1) / kInt8Block * sizeof(float);
}

void encode(Wire wire, const float* from, size_t count, uint8_t* to) {
#if defined(DTRAIN_X86)
  if (has_avx2()) return encode_avx2(wire, from, count, to);
#endif
  encode_all(wire, from, count, to);
}

void decode(Wire wire, const uint8_t* from, size_t count, float* to) {
#if defined(DTRAIN_X86)
  if (has_avx2()) return decode_avx2(wire, from, count, to);
#endif
  decode_all(wire, from, count, to);
}

void decode_add(Wire wire, const uint8_t* from, size_t count, float* to) {
#if defined(DTRAIN_X86)
  if (has_avx2()) return decode_add_avx2(wire, from, count, to);
#endif
  decode_add_all(wire, from, count, to);
}

}  // namespace dtrain
