// float16 and bfloat16 as 16 bits, without branches: loops over these become vector code with any instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__GNUC__)
#define DTRAIN_INLINE inline __attribute__((always_inline))
#else
#define DTRAIN_INLINE inline
#endif

// Code for newer instruction sets, chosen when the program runs. DTRAIN_PLAIN leaves it out, for tests of the other
// code.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(DTRAIN_PLAIN)
#define DTRAIN_X86 1
#endif

namespace dtrain {

DTRAIN_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

DTRAIN_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// For choices among three, where compilers would rather branch than write vector code.
DTRAIN_INLINE uint32_t choose_bits(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

DTRAIN_INLINE float float_of_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Rounds to nearest even. A NaN stays one (and is made quiet: its payload might be cut to zero, which is an infinity).
DTRAIN_INLINE uint16_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

DTRAIN_INLINE float float_of_f16(uint16_t half) {
  const uint32_t rest = (half & 0x7fffu) << 13;
  const uint32_t exponent = rest & 0x0f800000u;
  const uint32_t normal = rest + (112u << 23);
  const uint32_t special = normal + (112u << 23);
  // A subnormal half: let the float unit normalise it.
  const uint32_t subnormal = bits_of(float_of(rest + (113u << 23)) - float_of(113u << 23));
  const uint32_t size = choose_bits(exponent == 0x0f800000u, special, choose_bits(exponent == 0, subnormal, normal));
  return float_of(size | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// Rounds to nearest even, overflows to infinity, keeps NaN.
DTRAIN_INLINE uint16_t f16_of(float value) {
  const uint32_t all = bits_of(value);
  const uint32_t sign = all & 0x80000000u;
  const uint32_t bits = all ^ sign;
  const uint32_t special = choose_bits(bits > 0x7f800000u, 0x7e00u, 0x7c00u);
  const uint32_t magic = 126u << 23;
  const uint32_t subnormal = bits_of(float_of(bits) + float_of(magic)) - magic;
  const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const uint32_t size = choose_bits(bits >= (143u << 23), special, choose_bits(bits < (113u << 23), subnormal, normal));
  return static_cast<uint16_t>(size | (sign >> 16));
}

}  // namespace dtrain
