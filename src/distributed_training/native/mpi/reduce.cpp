#include "reduce.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "half.h"

#if defined(DTRAIN_X86)
#include <immintrin.h>
#endif

// The loops below are written to be vectorised by the compiler, whatever level the rest is compiled with. Each kernel
// exists in a plain form and, on x86-64, in one for newer instruction sets that is chosen when the program runs.
#if defined(__GNUC__) && !defined(__clang__)
#if !defined(__SANITIZE_ADDRESS__)
#pragma GCC optimize("O3")
#endif
#define DTRAIN_INDEPENDENT _Pragma("GCC ivdep")
#elif defined(__clang__)
#define DTRAIN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define DTRAIN_INDEPENDENT
#endif

namespace dtrain {
namespace {

// How an element is stored and what it is computed in.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static DTRAIN_INLINE Value load(Stored stored) { return stored; }
  static DTRAIN_INLINE Stored store(Value value) { return value; }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  static DTRAIN_INLINE Value load(Stored stored) { return float_of_f16(stored); }
  static DTRAIN_INLINE Stored store(Value value) { return f16_of(value); }
};

struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  static DTRAIN_INLINE Value load(Stored stored) { return float_of_bf16(stored); }
  static DTRAIN_INLINE Stored store(Value value) { return bf16_of(value); }
};

struct Boolean {
  using Stored = uint8_t;
  using Value = uint8_t;
  static DTRAIN_INLINE Value load(Stored stored) { return stored != 0; }
  static DTRAIN_INLINE Stored store(Value value) { return value; }
};

// Integers wrap around, which only unsigned ones may do.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < 4), uint32_t, std::make_unsigned_t<T>>;

struct Sum {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
    } else {
      return a + b;
    }
  }
};

struct Average : Sum {};

struct Product {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
    } else {
      return a * b;
    }
  }
};

// The second comparison is true for NaN only: NaN wins whichever side it is on.
struct Minimum {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct Maximum {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct And {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <class T>
  static DTRAIN_INLINE T apply(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};

// A divisor may be larger than a small integer can hold.
template <class Value>
using Divisor = std::conditional_t<std::is_integral_v<Value>, int64_t, Value>;

template <class Number, class Operation>
DTRAIN_INLINE typename Number::Stored finish(typename Number::Value value, Divisor<typename Number::Value> divisor) {
  if constexpr (std::is_same_v<Operation, Average>) {
    return Number::store(static_cast<typename Number::Value>(value / divisor));
  } else {
    (void)divisor;
    return Number::store(value);
  }
}

// Two sources, the usual case, go straight through; more are gathered block by block in a buffer that stays in the
// level 1 cache. `to` may be one of the sources: element i is read before it is written, and no other element is.
template <class Number, class Operation>
DTRAIN_INLINE void reduce_all(void* target, const void* const* from, int sources, size_t count, int64_t divide_by) {
  using Stored = typename Number::Stored;
  using Value = typename Number::Value;
  Stored* to = static_cast<Stored*>(target);
  const auto divisor = static_cast<Divisor<Value>>(divide_by);
  if (sources == 2) {
    const Stored* a = static_cast<const Stored*>(from[0]);
    const Stored* b = static_cast<const Stored*>(from[1]);
    DTRAIN_INDEPENDENT
    for (size_t i = 0; i < count; ++i) {
      to[i] = finish<Number, Operation>(Operation::apply(Number::load(a[i]), Number::load(b[i])), divisor);
    }
    return;
  }
  constexpr size_t kBlock = 4096 / sizeof(Value);
  alignas(64) Value total[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    const Stored* first = static_cast<const Stored*>(from[0]) + start;
    for (size_t i = 0; i < length; ++i) total[i] = Number::load(first[i]);
    for (int source = 1; source < sources; ++source) {
      const Stored* next = static_cast<const Stored*>(from[source]) + start;
      for (size_t i = 0; i < length; ++i) total[i] = Operation::apply(total[i], Number::load(next[i]));
    }
    for (size_t i = 0; i < length; ++i) to[start + i] = finish<Number, Operation>(total[i], divisor);
  }
}

using Kernel = void (*)(void*, const void* const*, int, size_t, int64_t);

template <class Number, class Operation>
void plain(void* to, const void* const* from, int sources, size_t count, int64_t divisor) {
  reduce_all<Number, Operation>(to, from, sources, count, divisor);
}

#if defined(DTRAIN_X86)
template <class Number, class Operation>
__attribute__((target("avx2"))) void avx2(void* to, const void* const* from, int sources, size_t count,
                                          int64_t divisor) {
  reduce_all<Number, Operation>(to, from, sources, count, divisor);
}

// float16 with the processor's own conversions, which all that have avx2 have: several times faster.
template <class Operation>
__attribute__((target("avx2,f16c"))) void f16c(void* to, const void* const* from, int sources, size_t count,
                                               int64_t divisor) {
  constexpr size_t kBlock = 1024;
  alignas(64) float total[kBlock], next[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t length = std::min(kBlock, count - start);
    for (int source = 0; source < sources; ++source) {
      const uint16_t* halves = static_cast<const uint16_t*>(from[source]) + start;
      float* values = source == 0 ? total : next;
      size_t i = 0;
      for (; i + 8 <= length; i += 8) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
        _mm256_store_ps(values + i, _mm256_cvtph_ps(eight));
      }
      for (; i < length; ++i) values[i] = float_of_f16(halves[i]);
      if (source == 0) continue;
      for (i = 0; i < length; ++i) total[i] = Operation::apply(total[i], next[i]);
    }
    if constexpr (std::is_same_v<Operation, Average>) {
      for (size_t i = 0; i < length; ++i) total[i] /= static_cast<float>(divisor);
    }
    uint16_t* halves = static_cast<uint16_t*>(to) + start;
    size_t i = 0;
    for (; i + 8 <= length; i += 8) {
      const __m128i eight = _mm256_cvtps_ph(_mm256_load_ps(total + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), eight);
    }
    for (; i < length; ++i) halves[i] = f16_of(total[i]);
  }
  (void)divisor;
}

template <class Number, class Operation>
Kernel choose() {
  static const bool newer = __builtin_cpu_supports("avx2") != 0;
  if constexpr (std::is_same_v<Number, Float16>) {
    if (newer) return &f16c<Operation>;
  }
  return newer ? &avx2<Number, Operation> : &plain<Number, Operation>;
}
#else
template <class Number, class Operation>
Kernel choose() {
  return &plain<Number, Operation>;
}
#endif

template <class Number>
Kernel kernel_of_floats(Op op) {
  switch (op) {
    case Op::sum: return choose<Number, Sum>();
    case Op::average: return choose<Number, Average>();
    case Op::minimum: return choose<Number, Minimum>();
    case Op::maximum: return choose<Number, Maximum>();
    case Op::product: return choose<Number, Product>();
    default: return nullptr;
  }
}

template <class Number>
Kernel kernel_of_integers(Op op) {
  switch (op) {
    case Op::band: return choose<Number, And>();
    case Op::bor: return choose<Number, Or>();
    case Op::bxor: return choose<Number, Xor>();
    default: return kernel_of_floats<Number>(op);
  }
}

Kernel kernel_of_booleans(Op op) {
  switch (op) {
    case Op::sum:
    case Op::maximum:
    case Op::bor: return choose<Boolean, Or>();
    case Op::product:
    case Op::minimum:
    case Op::band: return choose<Boolean, And>();
    case Op::bxor: return choose<Boolean, Xor>();
    default: return nullptr;
  }
}

Kernel find_kernel(Dtype dtype, Op op) {
  switch (dtype) {
    case Dtype::f32: return kernel_of_floats<Plain<float>>(op);
    case Dtype::f64: return kernel_of_floats<Plain<double>>(op);
    case Dtype::f16: return kernel_of_floats<Float16>(op);
    case Dtype::bf16: return kernel_of_floats<BFloat16>(op);
    case Dtype::i8: return kernel_of_integers<Plain<int8_t>>(op);
    case Dtype::u8: return kernel_of_integers<Plain<uint8_t>>(op);
    case Dtype::i16: return kernel_of_integers<Plain<int16_t>>(op);
    case Dtype::i32: return kernel_of_integers<Plain<int32_t>>(op);
    case Dtype::i64: return kernel_of_integers<Plain<int64_t>>(op);
    case Dtype::boolean: return kernel_of_booleans(op);
  }
  return nullptr;
}

Kernel kernel(Dtype dtype, Op op) {
  const Kernel found = find_kernel(dtype, op);
  if (found == nullptr) {
    throw std::invalid_argument(std::string("the reduction '") + name_of(op) + "' has no meaning for " +
                                name_of(dtype) + " tensors; convert them to another dtype or use another reduction");
  }
  return found;
}

}  // namespace

size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
    case Dtype::i64: return 8;
    case Dtype::f32:
    case Dtype::i32: return 4;
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::i16: return 2;
    default: return 1;
  }
}

const char* name_of(Dtype dtype) {
  static const char* const names[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                      "uint8",   "int16",   "int32",   "int64",    "bool"};
  const auto index = static_cast<size_t>(dtype);
  return index < sizeof names / sizeof *names ? names[index] : "unknown dtype";
}

const char* name_of(Op op) {
  static const char* const names[] = {"sum", "average", "min", "max", "product", "band", "bor", "bxor"};
  const auto index = static_cast<size_t>(op);
  return index < sizeof names / sizeof *names ? names[index] : "unknown operation";
}

bool supports(Dtype dtype, Op op) { return find_kernel(dtype, op) != nullptr; }

void require_supported(Dtype dtype, Op op) { kernel(dtype, op); }

void reduce_into(void* to, const void* from, size_t count, Dtype dtype, Op op) {
  const void* sources[] = {to, from};
  kernel(dtype, op == Op::average ? Op::sum : op)(to, sources, 2, count, 1);
}

void reduce_many(void* to, const void* const* from, int sources, size_t count, Dtype dtype, Op op, int64_t divisor) {
  if (sources < 1) throw std::invalid_argument("a reduction needs at least one source");
  kernel(dtype, op)(to, from, sources, count, divisor > 0 ? divisor : sources);
}

void divide(void* to, size_t count, Dtype dtype, int64_t divisor) {
  const void* sources[] = {to};
  reduce_many(to, sources, 1, count, dtype, Op::average, divisor);
}

}  // namespace dtrain
