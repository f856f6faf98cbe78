// Element-wise reductions of plain arrays: what an all-reduce does with the numbers once it has them.
//
// No MPI, no torch: only memory. The order of the sources is fixed (0, 1, 2, ...), so that every rank that reduces the
// same sources gets the same bits. Half-precision sums are accumulated in float32 and rounded once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dtrain {

enum class Dtype : uint8_t { f32, f64, f16, bf16, i8, u8, i16, i32, i64, boolean };
enum class Op : uint8_t { sum, average, minimum, maximum, product, band, bor, bxor };

// Bytes of one element.
size_t size_of(Dtype dtype);

// The names users know: "float32", "bool", ...; "sum", "average", "min", "max", "product", "band", "bor", "bxor".
const char* name_of(Dtype dtype);
const char* name_of(Op op);

// Whether `op` has a meaning for `dtype`: bitwise operations need integers or bool, a bool has no average. Everything
// below throws std::invalid_argument for a pair that is not supported.
//   bool: sum, max, bor are "or"; product, min, band are "and"; bxor is "xor". The result is 0 or 1.
//   integers: sums and products wrap around; the average is cut towards zero.
//   floats: min and max give NaN where any source is NaN, as torch does.
bool supports(Dtype dtype, Op op);
void require_supported(Dtype dtype, Op op);

// to[i] = to[i] op from[i]. `average` adds only: divide once, at the end, with divide().
void reduce_into(void* to, const void* from, size_t count, Dtype dtype, Op op);

// to[i] = from[0][i] op from[1][i] op ... op from[sources - 1][i], rounded once.
//   divisor   what `average` divides by; 0 means `sources`. Ignored by the other operations.
// `to` may be one of the sources (the same pointer, not a shifted one). Pointers are aligned for their type.
void reduce_many(void* to, const void* const* from, int sources, size_t count, Dtype dtype, Op op, int64_t divisor = 0);

// to[i] = to[i] / divisor: the last step of an average whose sum was made elsewhere.
void divide(void* to, size_t count, Dtype dtype, int64_t divisor);

}  // namespace dtrain
